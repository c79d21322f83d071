"""The engine's own counts, read at the moment of a scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import GaugeMetricFamily, SummaryMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from engine.snapshot import EngineSnapshot, StepKind


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
        units = GaugeMetricFamily(f"{prefix}_cache_units", "Units of a pool by state.", labels=["pool", "state"])
        capacity = GaugeMetricFamily(f"{prefix}_cache_capacity", "Units of a pool.", labels=["pool"])
        for pool, counts in (("device_kv_pages", now.kv_pages), ("device_state_slots", now.state_slots)):
            capacity.add_metric([pool], counts.capacity)
            for state in ("free", "cached", "pinned", "in_flight"):
                units.add_metric([pool, state], getattr(counts, state))
        yield units
        yield capacity
        steps = SummaryMetricFamily(f"{prefix}_step_seconds", "Steps by what they compute.", labels=["kind"])
        for kind in StepKind:
            steps.add_metric([kind.value], now.steps_of_kind[kind], now.step_seconds_of_kind[kind])
        yield steps
