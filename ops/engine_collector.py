"""The engine's own counts, read at the moment of a scrape; those of the cache are in `ops/cache_metrics.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import GaugeMetricFamily, SummaryMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from engine.snapshot import EngineSnapshot, StepKind
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
        yield from cache_metrics(prefix, now)
        steps = SummaryMetricFamily(f"{prefix}_step_seconds", "Steps by what they compute.", labels=["kind"])
        for kind in StepKind:
            steps.add_metric([kind.value], now.steps_of_kind[kind], now.step_seconds_of_kind[kind])
        yield steps
