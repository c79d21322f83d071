"""The metrics: every series is there from the start, and each counts what its name says."""

from dataclasses import dataclass
from typing import get_args

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cache import CacheStats, CheckpointKind, CopyObject, Fault, PoolCounts, ReuseReport, SkipReason
from engine.copies import Direction, Transfer, no_transfers
from engine.distribution import LATENCY_BOUNDS_SECONDS, Distribution
from engine.events import RequestEnded
from engine.request import Delta, FinishReason, Timings, Usage
from engine.snapshot import EngineSnapshot, EngineStatus
from engine.totals import StepKind
from ops.insights.types import Insight, InsightId, ReuseState, Severity
from ops.metrics import Compat, Metrics
from ops.outcome import outcome_of
from server.schema.usage import LossReason

CHAT = "/v1/chat/completions"


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@dataclass
class Insights:
    active: tuple[Insight, ...] = ()
    reuse: ReuseState = ReuseState.HEALTHY


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def metrics(clock):
    return Metrics("1.2.3", [CHAT, "/tokenize"], clock)


def read(metrics):
    """Every sample by name and labels."""
    page, content_type = metrics.expose("text/plain")
    assert content_type.startswith("text/plain")
    families = text_string_to_metric_families(page.decode())
    return {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}


def snapshot(**counts):
    pools = {
        "kv_pages": PoolCounts(10, 4, 3, 2, 1),
        "state_slots": PoolCounts(5, 5, 0, 0, 0),
        "host_units": PoolCounts(9, 2, 7, 0, 0),
        "host_state_slots": PoolCounts(3, 1, 2, 0, 0),
    }
    zeros = dict.fromkeys(EngineSnapshot.__dataclass_fields__, 0)
    none = Distribution(LATENCY_BOUNDS_SECONDS).view()
    kinds = {
        "step_seconds": dict.fromkeys(StepKind, none),
        "step_overhead_seconds": none,
        "oldest_entry_seconds": {},
    }
    cache = {"cache": CacheStats(), "transfers": no_transfers(), "faults": frozenset()}
    rates = {"restore_bytes_per_second": None, "prefill_tokens_per_second": None}
    return EngineSnapshot(**zeros | pools | kinds | cache | rates | {"status": EngineStatus.RUNNING} | counts)


def test_every_series_is_there_at_zero_before_the_first_request(metrics):
    found = read(metrics)
    for outcome in ("ok", "bad_request", "overloaded", "cancelled", "error"):
        assert found["dalsegno_requests_total", CHAT, outcome] == 0
        assert found["dalsegno_requests_total", "/tokenize", outcome] == 0
    for reuse in ("hit", "root"):
        assert found["dalsegno_time_to_first_token_seconds_count", reuse] == 0
    for name in ("inter_token_latency_seconds", "request_duration_seconds", "queue_seconds"):
        assert found[f"dalsegno_{name}_count",] == 0
    assert found["dalsegno_prompt_tokens_total",] == found["dalsegno_generation_tokens_total",] == 0
    assert found["dalsegno_build_info", "1.2.3"] == 1
    for source in ("computed", "device", "host", "disk"):
        assert found["dalsegno_prompt_tokens_by_source_total", source] == 0
    for path in ("root", "private_turn_closure", "private_endpoint", "private_long_anchor", "shared_branch"):
        assert found["dalsegno_reuse_selections_total", path] == 0
    for reason in get_args(LossReason):
        assert found["dalsegno_reuse_lost_tokens_total", reason] == 0


@pytest.mark.parametrize(
    ("status", "has_failed", "outcome"),
    [
        (200, False, "ok"),
        (200, True, "error"),
        (400, False, "bad_request"),
        (429, False, "overloaded"),
        (499, False, "cancelled"),
        (503, False, "error"),
        (0, False, "error"),
    ],
)
def test_a_request_counts_once_under_its_outcome(metrics, status, has_failed, outcome):
    for endpoint in (CHAT, "/elsewhere"):
        metrics.request_ended(endpoint, outcome_of(status, has_failed), 0.5)
    counted = {key: value for key, value in read(metrics).items() if key[0] == "dalsegno_requests_total" and value}
    assert counted == {("dalsegno_requests_total", CHAT, outcome): 1}
    assert read(metrics)["dalsegno_request_duration_seconds_sum",] == 0.5


@pytest.mark.parametrize(("cached", "reuse"), [(0, "root"), (3, "hit")])
def test_an_answer_is_counted_as_it_is_taken(metrics, clock, cached, reuse):
    watch = metrics.new_generation()
    for at, token_ids in ((1.0, (1,)), (1.5, (2,)), (2.5, (3, 4)), (2.5, ())):
        clock.now = at
        watch(Delta("x", token_ids))
    timings = Timings(0.25, 0.5, 0.125, 0.75, stalled_seconds=0.375, preempted_seconds=2.0)
    # The end token is the fifth.
    watch(Delta("", (), FinishReason.STOP, Usage(7, 5, cached), timings))
    assert read(metrics)["dalsegno_prompt_tokens_total",] == 0, "whether its consumer takes the end or not"
    metrics.answer_ended(RequestEnded("a", FinishReason.STOP, Usage(7, 5, cached), timings, None))
    found = read(metrics)
    assert found["dalsegno_generation_tokens_total",] == 5
    assert found["dalsegno_prompt_tokens_total",] == 7
    assert found["dalsegno_inter_token_latency_seconds_count",] == 3
    assert found["dalsegno_inter_token_latency_seconds_sum",] == 1.5
    assert found["dalsegno_time_to_first_token_seconds_sum", reuse] == 0.75
    assert found["dalsegno_queue_seconds_sum",] == 0.25
    assert found["dalsegno_prefill_seconds_sum", reuse] == 0.625, "no wait for others is in it"
    assert found["dalsegno_stalled_seconds_sum",] == 0.375
    assert found["dalsegno_preempted_seconds_sum",] == 2.0


@pytest.mark.parametrize("reason", [FinishReason.CANCELLED, FinishReason.ERROR])
def test_an_answer_that_was_broken_off_counts_for_no_prompt(metrics, reason):
    reuse = ReuseReport("root", 10, 0, 6, {"device": 0, "host": 0, "disk": 0}, {"cold": 10})
    metrics.answer_ended(RequestEnded("a", reason, Usage(10, 1), Timings(ttft_seconds=1.0), reuse))
    found = read(metrics)
    assert found["dalsegno_prompt_tokens_total",] == found["dalsegno_reuse_selections_total", "root"] == 0
    assert found["dalsegno_time_to_first_token_seconds_count", "root"] == 0


def test_a_prompt_is_counted_by_where_its_tokens_came_from(metrics):
    reports = [
        ReuseReport(
            *("root", 10, 0, 6, {"device": 0, "host": 0, "disk": 0}, {"evicted_state": 6, "cold": 3}), expected_tokens=2
        ),
        ReuseReport(
            *("private_endpoint", 20, 15, 16, {"device": 4, "host": 11, "disk": 0}, {"evicted_state": 1}),
            expected_tokens=15,
        ),
    ]
    for reuse in reports:
        usage = Usage(reuse.prompt_tokens, 1, reuse.cached_tokens)
        metrics.answer_ended(RequestEnded("a", FinishReason.STOP, usage, Timings(), reuse))
    found = read(metrics)
    sources = {
        source: found["dalsegno_prompt_tokens_by_source_total", source] for source in ("computed", "device", "host")
    }
    assert sources == {"computed": 15, "device": 4, "host": 11}
    assert found["dalsegno_prompt_tokens_total",] == sum(sources.values())
    assert found["dalsegno_reuse_achieved_tokens_total",] == 15
    assert found["dalsegno_reuse_expected_tokens_total",] == 17
    assert found["dalsegno_reuse_achievable_tokens_total",] == 22
    assert found["dalsegno_reuse_selections_total", "root"] == 1
    assert found["dalsegno_reuse_selections_total", "private_endpoint"] == 1
    assert found["dalsegno_reuse_lost_tokens_total", "evicted_state"] == 7
    assert found["dalsegno_reuse_lost_tokens_total", "cold"] == 3


def test_the_engine_is_read_at_each_scrape(metrics):
    now = [snapshot(running=2, waiting=1)]
    metrics.watch_engine(lambda: now[0], "demo", "qwen3_5", "torch")
    found = read(metrics)
    assert (found["dalsegno_requests_running",], found["dalsegno_requests_waiting",]) == (2, 1)
    assert found["dalsegno_cache_capacity", "device_kv_pages"] == 10
    states = {state: found["dalsegno_cache_units", "device_kv_pages", state] for state in ("free", "cached", "pinned")}
    assert states == {"free": 4, "cached": 3, "pinned": 2}
    assert found["dalsegno_cache_units", "device_kv_pages", "in_flight"] == 1
    assert found["dalsegno_model_info", "qwen3_5", "torch", "demo"] == 1
    seconds = Distribution(LATENCY_BOUNDS_SECONDS)
    seconds.observe(0.25, 2)
    now[0] = snapshot(step_seconds=dict.fromkeys(StepKind, seconds.view()), step_overhead_seconds=seconds.view())
    found = read(metrics)
    assert found["dalsegno_requests_running",] == 0
    for kind in ("prefill", "decode", "mixed"):
        assert (found["dalsegno_step_seconds_count", kind], found["dalsegno_step_seconds_sum", kind]) == (2, 0.5)
        assert found["dalsegno_step_seconds_bucket", kind, "0.1"] == 0
        assert found["dalsegno_step_seconds_bucket", kind, "0.25"] == 2
    assert (found["dalsegno_step_overhead_seconds_count",], found["dalsegno_step_overhead_seconds_sum",]) == (2, 0.5)


def test_a_pool_without_an_entry_has_no_oldest_one(metrics):
    metrics.watch_engine(lambda: snapshot(oldest_entry_seconds={"host_units": 12.5}), "demo", "qwen3_5", "torch")
    found = {key: value for key, value in read(metrics).items() if key[0] == "dalsegno_cache_oldest_entry_seconds"}
    assert found == {("dalsegno_cache_oldest_entry_seconds", "host_units"): 12.5}


def test_the_cache_is_read_at_each_scrape_with_every_series_from_the_start(metrics):
    stats = CacheStats()
    now = [snapshot(cache=stats)]
    metrics.watch_engine(lambda: now[0], "demo", "qwen3_5", "torch")
    found = read(metrics)
    capacities = {"device_kv_pages": 10, "device_state_slots": 5, "host_units": 9, "host_state_slots": 3}
    for pool, capacity in capacities.items():
        assert found["dalsegno_cache_capacity", pool] == capacity
        states = ("free", "cached", "pinned", "in_flight")
        assert sum(found["dalsegno_cache_units", pool, state] for state in states) == capacity
    for pool in ("device_kv_pages", "device_state_slots", "host_units"):
        assert found["dalsegno_cache_orphans_reclaimed_total", pool] == 0
        for kind in CheckpointKind:
            assert found["dalsegno_cache_evictions_total", kind.value, pool] == 0
    for reason in SkipReason:
        assert found["dalsegno_cache_publish_skipped_total", reason.value] == 0
    for direction in ("device_to_host", "host_to_device"):
        for what in ("kv_page", "state"):
            assert found["dalsegno_cache_transfer_bytes_total", direction, what] == 0
            assert found["dalsegno_cache_transfer_seconds_total", direction, what] == 0
    assert ("dalsegno_cache_restore_bytes_per_second",) not in found
    assert found["dalsegno_cache_restore_failures_total",] == found["dalsegno_cache_ledger_violations_total",] == 0

    stats.evictions["host_units", CheckpointKind.PRIVATE_ENDPOINT] += 2
    stats.publish_skipped[SkipReason.HOST_PINNED] += 3
    stats.restore_failures, stats.violations = 4, 5
    stats.orphans_reclaimed["host_units"] += 6
    transfers = no_transfers()
    transfers[Direction.HOST_TO_DEVICE, CopyObject.STATE] = Transfer(bytes=9, seconds=0.5, count=1)
    rates = {"restore_bytes_per_second": 7.0, "prefill_tokens_per_second": 8.0}
    now[0] = snapshot(cache=stats, transfers=transfers, **rates)
    found = read(metrics)
    assert found["dalsegno_cache_transfer_bytes_total", "host_to_device", "state"] == 9
    assert found["dalsegno_cache_transfer_seconds_total", "host_to_device", "state"] == 0.5
    assert found["dalsegno_cache_restore_bytes_per_second",] == 7
    assert found["dalsegno_cache_prefill_tokens_per_second",] == 8
    assert found["dalsegno_cache_evictions_total", "private_endpoint", "host_units"] == 2
    assert found["dalsegno_cache_publish_skipped_total", "host_pinned"] == 3
    assert found["dalsegno_cache_restore_failures_total",] == 4
    assert found["dalsegno_cache_ledger_violations_total",] == 5
    assert found["dalsegno_cache_orphans_reclaimed_total", "host_units"] == 6


def test_faults_of_the_engine_are_counted(metrics):
    now = {"heartbeat_age_seconds": 1.5, "step_failures_total": 2, "loop_restarts_total": 1}
    now |= {"suspensions_total": 3, "recomputed_tokens_total": 41}
    metrics.watch_engine(lambda: snapshot(**now), "demo", "qwen3_5", "torch")
    found = read(metrics)
    assert found["dalsegno_engine_heartbeat_age_seconds",] == 1.5
    assert found["dalsegno_engine_step_failures_total",] == 2
    assert found["dalsegno_engine_loop_restarts_total",] == 1
    assert found["dalsegno_suspensions_total",] == 3
    assert found["dalsegno_recomputed_tokens_total",] == 41


def test_lines_that_the_event_log_lost_are_asked_for_at_each_scrape(metrics):
    assert read(metrics)["dalsegno_event_log_lost_lines_total",] == 0
    lost = [1]
    metrics.watch_event_log(lambda: lost[0])
    lost[0] = 4
    assert read(metrics)["dalsegno_event_log_lost_lines_total",] == 4


@pytest.mark.parametrize(
    ("state", "is_degraded"),
    [
        (ReuseState.HEALTHY, 0),
        (ReuseState.DEGRADED, 1),
        (ReuseState.COLLAPSED, 1),
        (ReuseState.RECOVERING, 0),
    ],
)
def test_reuse_is_in_one_state(metrics, state, is_degraded):
    insights = Insights()
    metrics.watch_insights(insights)
    insights.reuse = state
    found = read(metrics)
    assert {each: found["dalsegno_reuse_state", each.value] for each in ReuseState} == {
        each: float(each is state) for each in ReuseState
    }
    assert found["dalsegno_reuse_degraded",] == is_degraded


def test_a_fault_of_a_drill_is_1_while_it_is_on(metrics):
    on = frozenset({Fault.DROP_STATE})
    metrics.watch_engine(lambda: snapshot(faults=on), "model", "qwen3", "torch")
    found = {key: value for key, value in read(metrics).items() if key[0] == "dalsegno_fault_active"}
    assert found == {("dalsegno_fault_active", each.value): float(each in on) for each in Fault}


def test_an_insight_is_1_while_it_holds_under_the_severity_it_has(metrics):
    insights = Insights()
    metrics.watch_insights(insights)
    every = {("dalsegno_insight_active", each.value, severity.value) for each in InsightId for severity in Severity}
    found = {key: value for key, value in read(metrics).items() if key[0] == "dalsegno_insight_active"}
    assert found == dict.fromkeys(every, 0)
    insights.active = (Insight(InsightId.ENGINE_FAULTS, Severity.WARNING, "", "", {}, {}, 0, ""),)
    found = {key for key, value in read(metrics).items() if key[0] == "dalsegno_insight_active" and value}
    assert found == {("dalsegno_insight_active", "engine.faults", "warning")}


def test_the_names_of_vllm_tell_our_numbers(clock):
    metrics = Metrics("1.2.3", [CHAT], clock, compat=Compat.VLLM)
    now = {"running": 2, "waiting": 1, "kv_pages": PoolCounts(10, 4, 3, 2, 1)}
    metrics.watch_engine(lambda: snapshot(**now), "demo", "qwen3_5", "torch")
    for cached, ttft in ((0, 0.75), (15, 0.125)):
        sources = {"device": cached, "host": 0, "disk": 0}
        reuse = ReuseReport("root", 20, cached, cached, sources, {})
        usage, timings = Usage(20, 3, cached), Timings(ttft_seconds=ttft)
        metrics.answer_ended(RequestEnded("a", FinishReason.STOP, usage, timings, reuse))
        metrics.new_generation()(Delta("", (), FinishReason.STOP, usage, timings, reuse))
    found = {name[5:]: value for (name, *labels), value in read(metrics).items() if labels == ["0", "demo"]}
    assert found.pop("time_to_first_token_seconds_sum") == 0.875
    assert found.pop("time_to_first_token_seconds_count") == 2
    assert found == {
        "num_requests_running": 2,
        "num_requests_waiting": 1,
        "kv_cache_usage_perc": 0.3,
        "prefix_cache_queries_total": 40,
        "prefix_cache_hits_total": 15,
        "prompt_tokens_total": 40,
        "generation_tokens_total": 6,
    }
    buckets = {
        labels[1]: value
        for (name, *labels), value in read(metrics).items()
        if name == "vllm:time_to_first_token_seconds_bucket"
    }
    assert (buckets["0.1"], buckets["0.25"], buckets["1.0"], buckets["+Inf"]) == (0, 1, 2, 2)


def test_a_daemon_without_pages_uses_none_of_them():
    metrics = Metrics("1.2.3", [CHAT], compat=Compat.VLLM)
    metrics.watch_engine(lambda: snapshot(kv_pages=PoolCounts(0, 0, 0, 0, 0)), "demo", "qwen3_5", "torch")
    assert read(metrics)["vllm:kv_cache_usage_perc", "0", "demo"] == 0


def test_no_series_of_creation_times_doubles_the_page(metrics):
    assert "_created" not in metrics.expose("text/plain")[0].decode()


def test_openmetrics_is_there_for_who_asks(metrics):
    page, content_type = metrics.expose("application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    assert page.endswith(b"# EOF\n")
