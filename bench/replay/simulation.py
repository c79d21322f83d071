"""A trace through a simulated daemon: sends each request at its time, and keeps the threads in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from bench.replay.cost_model import CostModel
from bench.replay.garbage import collecting_rarely
from bench.replay.history import History
from bench.replay.measure import Measurements
from bench.replay.requests import SimRequest, Trace
from bench.replay.server import SimServer
from bench.replay.sizes import Sizes, offer_rules, scale_of
from cache import ContextCache
from engine.progress import Advance

_SAMPLE_SECONDS = 60.0
_AUDIT_SECONDS = 1800.0


class Simulation:
    """One trace and one daemon. Mutable: `run` serves the whole trace, once."""

    def __init__(self, trace: Trace, model: CostModel, sizes: Sizes, measurements: Measurements) -> None:
        """Raises UnusableOptionError for sizes that do not go with the trace."""
        scale = scale_of(trace.tokens_per_symbol, sizes.page_tokens, model)
        self._requests: Iterator[SimRequest] = trace.requests()
        self._next = next(self._requests, None)
        self._server = SimServer(sizes, scale, model, measurements)
        rules = offer_rules(scale, model, self._server.rules)
        self._history = History(rules, trace.tokens_per_symbol)
        self._queues: dict[str, deque[SimRequest]] = {}
        """Of each thread that waits for an answer, what it will send after that."""
        self._next_sample = self._next_audit = 0.0

    @property
    def cache(self) -> ContextCache:
        return self._server.cache

    def run(self, advance: Advance) -> None:
        """What was served is in the measurements, also when this is interrupted."""
        with collecting_rarely():
            while self._turn(advance):
                pass
        self._server.sample()
        self._server.audit()

    def _turn(self, advance: Advance) -> bool:
        """One step of the daemon, and what is sent before it; False at the end."""
        server = self._server
        while self._next is not None and self._next.arrival_seconds <= server.now:
            self._arrive(self._next)
            self._next = next(self._requests, None)
        if self._next is None and server.is_idle:
            return False
        if server.now >= self._next_sample:
            server.sample()
            self._next_sample = server.now + _SAMPLE_SECONDS
        if server.now >= self._next_audit:
            server.audit()
            self._next_audit = server.now + _AUDIT_SECONDS
        arrival = self._next.arrival_seconds if self._next is not None else server.now + _SAMPLE_SECONDS
        server.advance(arrival)
        while server.answered:
            advance(1)
            self._follow(server.answered.popleft().request.thread)
        return True

    def _arrive(self, request: SimRequest) -> None:
        if request.thread in self._queues:
            self._queues[request.thread].append(request)
        else:
            self._send(request)

    def _send(self, request: SimRequest) -> None:
        achievable = self._history.ask(request).achievable_tokens
        self._queues.setdefault(request.thread, deque())
        if not self._server.submit(request, achievable):
            self._follow(request.thread)

    def _follow(self, thread: str) -> None:
        """An answer is there: the next request of its thread may be sent."""
        queue = self._queues[thread]
        if queue:
            self._send(queue.popleft())
        else:
            del self._queues[thread]
