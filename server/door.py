"""The door of the daemon: how many connections may be open, which makes room for a newcomer, and why any was ended."""

from __future__ import annotations

import logging
import resource
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol

from ops.connections import ConnectionEnd

_SPARE_DESCRIPTORS = 16
"""That no connection takes: logs, files and models have to be opened too."""

_TELL_AGAIN_S = 60

_TOLD = {
    ConnectionEnd.TOO_MANY: "each of the {max_connections} connections that may be open has a request: "
    "a newcomer got 503 (--max-connections; at most half of the open files allowed)",
    ConnectionEnd.DESCRIPTORS: "file descriptors run out (ulimit -n): a newcomer got 503",
    ConnectionEnd.MADE_ROOM: "no connection more may be open (--max-connections {max_connections}, ulimit -n): "
    "the one that had waited longest without a request was closed for a newcomer",
    ConnectionEnd.HEADER_TIMEOUT: "headers did not come within {header_timeout_s:g} s (--header-timeout-s)",
    ConnectionEnd.HEADER_TOO_LARGE: "headers were larger than 64 KiB",
    ConnectionEnd.BODY_TIMEOUT: "a body stood still or dripped for {body_timeout_s:g} s (--body-timeout-s)",
    ConnectionEnd.MALFORMED: "what a client sent is no HTTP/1.1",
    ConnectionEnd.UNREAD: "an answer was not read for {body_timeout_s:g} s (--body-timeout-s)",
}

_LOUD = (ConnectionEnd.TOO_MANY, ConnectionEnd.DESCRIPTORS)

logger = logging.getLogger("dalsegno.http")


class Waiting(Protocol):
    """A connection that may have to make room."""

    def make_room(self) -> None:
        """Close it, and note that."""


@dataclass(slots=True)
class Door:
    """What all connections keep to, who of them waits without a whole request, and how many were ended, by reason.

    Mutable: only the event loop's thread may touch it.
    """

    max_connections: int
    header_timeout_s: float
    body_timeout_s: float
    """For each standstill of a body, and of an answer that its client does not read."""
    open: int = 0
    ended: Counter[ConnectionEnd] = field(default_factory=Counter)
    _idle: dict[Waiting, None] = field(default_factory=dict)
    """Between two requests, or before the first: the longest first."""
    _heads: dict[Waiting, None] = field(default_factory=dict)
    """In the middle of a head: the longest first."""
    _told_at: dict[ConnectionEnd, float] = field(default_factory=dict)

    def refusal(self, descriptor: int) -> ConnectionEnd | None:
        """Why a newcomer with this file descriptor, which counts as open, may not stay; None where it may, perhaps in
        another's place.

        The system gives the lowest that is free, so a high one says how few are left before the last is taken: then
        nobody could be let in, and not even be told.
        """
        if descriptor >= _descriptor_limit() - _SPARE_DESCRIPTORS:
            shortage = ConnectionEnd.DESCRIPTORS
        elif self.open > self.max_connections:
            shortage = ConnectionEnd.TOO_MANY
        else:
            return None
        longest = next(iter(self._idle or self._heads), None)
        if longest is None:
            return shortage
        longest.make_room()
        return None

    def waits(self, connection: Waiting, *, in_head: bool) -> None:
        """From now on the connection has no whole request; its place is kept when it was so before."""
        others, own = (self._idle, self._heads) if in_head else (self._heads, self._idle)
        others.pop(connection, None)
        own.setdefault(connection)

    def works(self, connection: Waiting) -> None:
        """It has a request, or is gone."""
        self._idle.pop(connection, None)
        self._heads.pop(connection, None)

    def note(self, reason: ConnectionEnd) -> None:
        """Count a connection that is ended; the log tells of each reason once a minute at most."""
        self.ended[reason] += 1
        now = time.monotonic()
        if now - self._told_at.get(reason, float("-inf")) >= _TELL_AGAIN_S:
            self._told_at[reason] = now
            limits = {name: getattr(self, name) for name in ("max_connections", "header_timeout_s", "body_timeout_s")}
            level = logging.WARNING if reason in _LOUD else logging.INFO
            logger.log(level, "%s; %d so far", _TOLD[reason].format(**limits), self.ended[reason])


def _descriptor_limit() -> float:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return float("inf") if soft == resource.RLIM_INFINITY else soft
