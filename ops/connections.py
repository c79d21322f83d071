"""Connections over HTTP as metrics: how many are open, and why the daemon ended those that it ended."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector


class ConnectionEnd(StrEnum):
    """Why a connection ended that its client had not done with."""

    TOO_MANY = "too_many"
    """It was refused: as many were open as may be, each with a request."""
    DESCRIPTORS = "descriptors"
    """It was refused: the process has hardly a file descriptor left."""
    MADE_ROOM = "made_room"
    """It had no whole request, and was closed for a newcomer in one of these two cases."""
    HEADER_TIMEOUT = "header_timeout"
    HEADER_TOO_LARGE = "header_too_large"
    BODY_TIMEOUT = "body_timeout"
    MALFORMED = "malformed"
    """What it sent is no HTTP/1.1."""
    UNREAD = "unread"
    """Its client did not read the answer."""


class ConnectionSource(Protocol):
    """Whoever has the connections; `server.door.Door` is one."""

    @property
    def open(self) -> int: ...

    @property
    def ended(self) -> Mapping[ConnectionEnd, int]: ...


class ConnectionCollector(Collector):
    """Asks at each scrape. Mutable: `source` is None until something listens."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self.source: ConnectionSource | None = None

    def collect(self) -> Iterator[Metric]:
        prefix, source = self._prefix, self.source
        yield GaugeMetricFamily(
            f"{prefix}_connections_open", "Connections over HTTP.", 0 if source is None else source.open
        )
        ended = CounterMetricFamily(
            f"{prefix}_connections_ended", "Connections that the daemon refused or ended.", labels=["reason"]
        )
        for reason in ConnectionEnd:
            ended.add_metric([reason.value], 0 if source is None else source.ended.get(reason, 0))
        yield ended
