"""The page of metrics as a whole: the names that people rely on, what docs/metrics.md says, and what promtool says."""

import dataclasses
import re
import subprocess
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ops.insights.types import ReuseState
from ops.metrics import Compat, Metrics
from tests.ops.test_metrics import CHAT, Insights, snapshot
from tests.programs import needs_program

DOCUMENT = Path(__file__).parents[2] / "docs/metrics.md"
MEASURED = {
    "restore_bytes_per_second": 7.0,
    "prefill_tokens_per_second": 8.0,
    "oldest_entry_seconds": {"device_kv_pages": 9.0},
}
"""What is absent from the page of a daemon that has just loaded its model."""

PROMISED = [
    "dalsegno_build_info",
    "dalsegno_model_info",
    "dalsegno_requests_running",
    "dalsegno_requests_waiting",
    "dalsegno_requests_total{endpoint,outcome}",
    "dalsegno_time_to_first_token_seconds{reuse}",
    "dalsegno_inter_token_latency_seconds",
    "dalsegno_request_duration_seconds",
    "dalsegno_queue_seconds",
    "dalsegno_prompt_tokens_total",
    "dalsegno_generation_tokens_total",
    "dalsegno_step_seconds{kind}",
    "dalsegno_step_overhead_seconds",
    "dalsegno_cache_units{pool,state}",
    "dalsegno_cache_capacity{pool}",
    "dalsegno_cache_oldest_entry_seconds",
    "dalsegno_prompt_tokens_by_source_total{source}",
    "dalsegno_reuse_selections_total{path}",
    "dalsegno_reuse_achievable_tokens_total",
    "dalsegno_reuse_achieved_tokens_total",
    "dalsegno_reuse_lost_tokens_total{reason}",
    "dalsegno_cache_evictions_total{pool,kind}",
    "dalsegno_cache_publish_skipped_total{reason}",
    "dalsegno_cache_transfer_bytes_total{direction,object}",
    "dalsegno_cache_transfer_seconds_total{direction,object}",
    "dalsegno_cache_restore_failures_total",
    "dalsegno_cache_ledger_violations_total",
    "dalsegno_cache_orphans_reclaimed_total{pool}",
    "dalsegno_reuse_state{state}",
    "dalsegno_reuse_degraded",
    "dalsegno_insight_active{id,severity}",
]
"""What the interface promises of every daemon that has just loaded its model."""

BEFORE_THE_ENGINE = [
    "dalsegno_build_info",
    "dalsegno_requests_total",
    "dalsegno_prompt_tokens_total",
    "dalsegno_generation_tokens_total",
    "dalsegno_reuse_achieved_tokens_total",
    "dalsegno_reuse_expected_tokens_total",
    "dalsegno_reuse_state",
    "dalsegno_reuse_degraded",
    "dalsegno_insight_active",
    "dalsegno_event_log_lost_lines_total",
    "process_start_time_seconds",
]


@dataclasses.dataclass(frozen=True)
class Family:
    kind: str
    labels: frozenset[str]


def metrics_with_engine(compat=Compat.NONE, **counts):
    metrics = Metrics("1.2.3", [CHAT], compat=compat)
    metrics.watch_insights(Insights())
    metrics.watch_engine(lambda: snapshot(**counts), "demo", "qwen3_5", "torch")
    return metrics


def page_of(metrics):
    return metrics.expose("text/plain")[0].decode()


def families(page):
    """By the name on the page."""
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", page, re.MULTILINE))
    labels = {name: set() for name in kinds}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            name = next(name for name in (sample.name, family.name) if name in kinds)
            labels[name] |= sample.labels.keys() - {"le"}
    return {name: Family(kind, frozenset(labels[name])) for name, kind in kinds.items()}


def documented():
    found = {}
    for row in re.findall(r"^\|(.*)\|$", DOCUMENT.read_text(), re.MULTILINE):
        name, kind, labels, unit, meaning, _watch = (cell.strip() for cell in row.split("|"))
        if name.startswith("`"):
            assert unit
            assert meaning
            assert name.strip("`") not in found
            found[name.strip("`")] = Family(kind, frozenset(re.findall(r"`(\w+)`", labels)))
    return found


def lint(page):
    promtool = needs_program("promtool", package="prometheus")
    done = subprocess.run([promtool, "check", "metrics"], input=page, capture_output=True, text=True, check=False)
    return (done.stdout + done.stderr).splitlines()


@pytest.mark.parametrize("promised", PROMISED)
def test_every_name_of_the_interface_is_there_from_the_start_with_its_labels(promised):
    name, _, labels = promised.rstrip("}").partition("{")
    found = families(page_of(metrics_with_engine()))
    assert found[name].labels >= frozenset(labels.split(",")) - {""}


def test_what_needs_no_engine_is_there_before_it():
    metrics = Metrics("1.2.3", [CHAT])
    metrics.watch_insights(Insights())
    page = page_of(metrics)
    assert set(BEFORE_THE_ENGINE) <= families(page).keys()
    assert "dalsegno_reuse_degraded 0.0" in page


def test_the_document_lists_exactly_what_is_exported():
    assert documented() == families(page_of(metrics_with_engine(Compat.VLLM, **MEASURED)))


def test_without_compat_there_is_no_name_of_vllm():
    ours = families(page_of(metrics_with_engine(**MEASURED)))
    assert ours == {name: family for name, family in documented().items() if not name.startswith("vllm:")}


def test_promtool_has_nothing_to_say_about_our_names():
    assert lint(page_of(metrics_with_engine(**MEASURED))) == []


def test_promtool_objects_only_to_the_colon_in_the_names_of_vllm():
    complaints = lint(page_of(metrics_with_engine(Compat.VLLM, **MEASURED)))
    names = [name for name in documented() if name.startswith("vllm:")]
    assert sorted(complaints) == sorted(f"{name} metric names should not contain ':'" for name in names)


def test_promtool_finds_what_is_wrong():
    assert lint("# HELP a_total Wrong.\n# TYPE a_total gauge\na_total 1\n")


def test_no_series_is_told_twice():
    insights = Insights(reuse=ReuseState.COLLAPSED)
    metrics = Metrics("1.2.3", [CHAT], compat=Compat.VLLM)
    metrics.watch_insights(insights)
    metrics.watch_engine(snapshot, "demo", "qwen3_5", "torch")
    lines = [line.rpartition(" ")[0] for line in page_of(metrics).splitlines()]
    assert len(lines) == len(set(lines))
