"""The engine's own counts, read at the moment of a scrape; those of the cache are in `ops/cache_metrics.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from cache import Fault
from engine.distribution import DistributionView
from engine.snapshot import EngineSnapshot
from engine.totals import StepKind
from ops.cache_metrics import cache_metrics


class EngineCollector(Collector):
    """Reads a snapshot at each scrape."""

    def __init__(self, prefix: str, snapshot: Callable[[], EngineSnapshot]) -> None:
        self._prefix = prefix
        self._snapshot = snapshot

    def describe(self) -> Iterator[Metric]:
        return self.collect()

    def collect(self) -> Iterator[Metric]:
        now, prefix = self._snapshot(), self._prefix
        yield GaugeMetricFamily(f"{prefix}_requests_running", "Requests that hold pages and a slot.", now.running)
        yield GaugeMetricFamily(f"{prefix}_requests_waiting", "Requests that wait for room.", now.waiting)
        yield CounterMetricFamily(
            f"{prefix}_suspensions",
            "Requests that were set aside while they ran, because the rest needed their room.",
            value=now.suspensions_total,
        )
        yield CounterMetricFamily(
            f"{prefix}_recomputed_tokens",
            "Tokens that were computed a second time for requests that had been set aside.",
            value=now.recomputed_tokens_total,
        )
        yield from cache_metrics(prefix, now)
        yield from _health(prefix, now)
        steps = HistogramMetricFamily(f"{prefix}_step_seconds", "Steps by what they compute.", labels=["kind"])
        for kind in StepKind:
            steps.add_metric([kind.value], _buckets(now.step_seconds[kind]), now.step_seconds[kind].sum)
        yield steps
        overhead = now.step_overhead_seconds
        yield HistogramMetricFamily(
            f"{prefix}_step_overhead_seconds",
            "Of each turn of the engine loop, what was neither computing nor copying.",
            _buckets(overhead),
            overhead.sum,
        )


def _buckets(seconds: DistributionView) -> list[tuple[str, float]]:
    return list(zip([*map(floatToGoString, seconds.bounds), "+Inf"], seconds.cumulative_counts, strict=True))


def _health(prefix: str, now: EngineSnapshot) -> Iterator[Metric]:
    yield GaugeMetricFamily(
        f"{prefix}_engine_heartbeat_age_seconds", "Time since the engine loop last turned.", now.heartbeat_age_seconds
    )
    yield CounterMetricFamily(
        f"{prefix}_engine_step_failures", "Steps that raised and failed their requests.", value=now.step_failures_total
    )
    yield CounterMetricFamily(
        f"{prefix}_engine_loop_restarts", "Times that the engine loop began anew.", value=now.loop_restarts_total
    )
    drill = GaugeMetricFamily(f"{prefix}_fault_active", "Whether a fault of a fire drill is on.", labels=["fault"])
    for fault in Fault:
        drill.add_metric([fault.value], float(fault in now.faults))
    yield drill
