"""Where events are told: stamped once, then handed to whoever keeps or shows them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from ops.events import Event, Record, Stamp

__all__ = ["Journal", "Record", "Sink"]

logger = logging.getLogger("dalsegno.events")


class Sink(Protocol):
    """Takes what is told, in the order in which it is told. It must be quick: it is called in the event loop."""

    def write(self, record: Record) -> None: ...


class Journal:
    """Hands each event to every sink. Mutable: only the event loop's thread may touch it."""

    def __init__(self, sinks: Iterable[Sink], instance_id: str, unix_time: Callable[[], float] = time.time) -> None:
        """`instance_id` tells this run of the daemon from every other one."""
        self.instance_id = instance_id
        self._sinks = tuple(sinks)
        self._unix_time = unix_time
        self._failing: set[int] = set()

    def tell(self, event: Event) -> None:
        """Never raises: a sink that fails is logged once, until it works again, and the others get the event."""
        record = Record(event, Stamp(round(self._unix_time() * 1000), self.instance_id))
        for number, sink in enumerate(self._sinks):
            try:
                sink.write(record)
            except Exception as error:
                if number not in self._failing:
                    self._failing.add(number)
                    logger.error("events do not reach %s; it is tried again", type(sink).__name__, exc_info=error)
            else:
                self._failing.discard(number)
