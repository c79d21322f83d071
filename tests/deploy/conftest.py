"""What the daemon exports, for all that asks for it by name."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ops.metrics import Metrics
from tests.ops.test_metrics import Insights, snapshot


@pytest.fixture(scope="session")
def series() -> list[tuple[str, dict[str, str]]]:
    """Every series of a daemon that has a model and has served for a while: its name and labels."""
    metrics = Metrics("1.2.3", ["/v1/chat/completions"])
    metrics.watch_insights(Insights())
    measured = {
        "oldest_entry_seconds": dict.fromkeys(snapshot().pools, 1.0),
        "restore_bytes_per_second": 1.0,
        "prefill_tokens_per_second": 1.0,
    }
    metrics.watch_engine(lambda: snapshot(**measured), "tiny", "qwen3_next", "torch")
    page, _ = metrics.expose("text/plain")
    families = text_string_to_metric_families(page.decode())
    return [(sample.name, sample.labels) for family in families for sample in family.samples]


@pytest.fixture(scope="session")
def exported(series: list[tuple[str, dict[str, str]]]) -> set[str]:
    """The names alone."""
    return {name for name, _ in series}
