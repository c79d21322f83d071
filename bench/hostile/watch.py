"""What others notice meanwhile: a stream that runs, and a probe that asks every 20 ms; with what the process costs."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import psutil

from bench.hostile.acts import Address
from bench.hostile.bodies import CHAT

_PROBE_SECONDS = 0.02
_PATIENCE_SECONDS = 600.0
_STREAM_TOKENS = 8000

Moments = list[float | None]
"""When pieces came; None where one stream ended and the next began, or where the probe waited for its turn."""


@dataclass(frozen=True, slots=True)
class Notice:
    """From one moment to another: the longest that each waited, and what the daemon took."""

    gap_seconds: float
    """Between two pieces of the stream."""
    wait_seconds: float
    """Of the probe, for an answer."""
    processor_seconds: float
    resident_bytes: int

    def least(self, other: Notice) -> Notice:
        """Of each figure the smaller one; memory is what this one found."""
        return Notice(
            min(self.gap_seconds, other.gap_seconds),
            min(self.wait_seconds, other.wait_seconds),
            min(self.processor_seconds, other.processor_seconds),
            self.resident_bytes,
        )


class Watch:
    """Two threads that look, while `with` holds. Mutable: each thread has a list of its own."""

    def __init__(self, address: Address, pid: int) -> None:
        self._address = address
        self._process = psutil.Process(pid)
        self._pieces: Moments = []
        self._asked: Moments = []
        self._is_over = threading.Event()
        self._has_begun = threading.Event()
        self._threads = [threading.Thread(target=look, daemon=True) for look in (self._stream, self._probe)]

    def __enter__(self) -> Watch:
        for thread in self._threads:
            thread.start()
        self._has_begun.wait(_PATIENCE_SECONDS)
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join(timeout=5)

    def now(self) -> tuple[float, float]:
        """A moment to measure from."""
        times = self._process.cpu_times()
        return time.perf_counter(), times.user + times.system

    def since(self, then: tuple[float, float]) -> Notice:
        """What was noticed since that moment."""
        end, processor_seconds = self.now()
        begin, before = then
        return Notice(
            gap_seconds=longest(list(self._pieces), begin, end),
            wait_seconds=longest(list(self._asked), begin, end),
            processor_seconds=processor_seconds - before,
            resident_bytes=self._process.memory_info().rss,
        )

    def _probe(self) -> None:
        connection = http.client.HTTPConnection(*self._address, timeout=_PATIENCE_SECONDS)
        while not self._is_over.wait(_PROBE_SECONDS):
            self._asked.append(time.perf_counter())
            try:
                connection.request("GET", "/health")
                connection.getresponse().read()
            except (OSError, http.client.HTTPException):
                connection.close()
            self._asked += [time.perf_counter(), None]

    def _stream(self) -> None:
        messages = [{"role": "user", "content": "Count."}]
        body: dict[str, Any] = {"messages": messages, "stream": True, "max_tokens": _STREAM_TOKENS, "ignore_eos": True}
        while not self._is_over.is_set():
            connection = http.client.HTTPConnection(*self._address, timeout=_PATIENCE_SECONDS)
            with suppress(OSError, http.client.HTTPException):
                connection.request("POST", CHAT, json.dumps(body), {"content-type": "application/json"})
                for line in connection.getresponse():
                    if line.startswith(b"data: {"):
                        self._pieces.append(time.perf_counter())
                        self._has_begun.set()
                    if self._is_over.is_set():
                        break
            self._pieces.append(None)
            connection.close()


def longest(moments: Moments, begin: float, end: float) -> float:
    """The longest time between two moments one behind the other that reaches into the window; the last one may not
    have come to its end yet."""
    open_end: Iterable[float | None] = [end] if moments and moments[-1] is not None else []
    gaps = (
        b - a for a, b in pairwise([*moments, *open_end]) if a is not None and b is not None and b > begin and a < end
    )
    return max(gaps, default=0.0)
