"""How reuse fares and which insights hold, as metrics: what an alert is built on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ops.insights.types import Insight, InsightId, ReuseState, Severity

_DEGRADED = (ReuseState.DEGRADED, ReuseState.COLLAPSED)
"""Where `/readyz?strict=reuse` refuses as well."""


class InsightSource(Protocol):
    """What holds at this moment; `ops.insights.book.Insights` is one."""

    @property
    def active(self) -> tuple[Insight, ...]: ...

    @property
    def reuse(self) -> ReuseState: ...


class InsightCollector(Collector):
    """Asks at each scrape; there is a series for each id and severity, so that an alert never waits for one."""

    def __init__(self, prefix: str, source: InsightSource) -> None:
        self._prefix = prefix
        self._source = source

    def collect(self) -> Iterator[Metric]:
        prefix, reuse = self._prefix, self._source.reuse
        states = GaugeMetricFamily(f"{prefix}_reuse_state", "How reuse fares: one of these is 1.", labels=["state"])
        for state in ReuseState:
            states.add_metric([state.value], float(state is reuse))
        yield states
        yield GaugeMetricFamily(
            f"{prefix}_reuse_degraded", "Whether reuse is degraded or has collapsed.", float(reuse in _DEGRADED)
        )
        active = {(insight.id, insight.severity) for insight in self._source.active}
        insights = GaugeMetricFamily(f"{prefix}_insight_active", "Insights that hold.", labels=["id", "severity"])
        for insight_id in InsightId:
            for severity in Severity:
                insights.add_metric([insight_id.value, severity.value], float((insight_id, severity) in active))
        yield insights
