"""One stream through the simulated daemon, watched as the real one is: each request, each second, each audit."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from bench.replay.conversations import Call, ConversationTrace
from bench.replay.cost_model import CostModel
from bench.replay.measure import Measurements
from bench.replay.requests import SimRequest
from bench.replay.server import SimServer
from bench.replay.sizes import Scale, Sizes, cache_options, scale_of
from cache import CacheOptions, ContextCache, Faults, PoolCounts, RequestLease, ReuseReport, audit, host_state_counts
from engine.distribution import DistributionView
from engine.events import AuditDone, ReuseDecided
from engine.snapshot import EngineSnapshot, EngineStatus

AUDIT_SECONDS = 30.0
_IDLE_AUDIT_SECONDS = 10.0
"""As engine/audit.py does, whose audits of an idle engine take at most a hundredth of its time."""
_TICK_SECONDS = 1.0
_IDLE_TICK_SECONDS = 30.0
_PATIENCE_SECONDS = 300.0
"""After the last call was sent: a daemon that has lost its pools may never answer."""


class Observer(Protocol):
    """Who watches: told of everything, at the time of the simulated clock."""

    def saw(self, decided: ReuseDecided, now: float, host_states: PoolCounts) -> None: ...

    def audited(self, done: AuditDone, now: float) -> None: ...

    def tick(self, snapshot: EngineSnapshot, now: float) -> bool:
        """Whether an audit is wanted."""
        ...

    @property
    def is_over(self) -> bool:
        """Whether all is known that there was to be known."""
        ...


@dataclass(frozen=True, slots=True)
class Setting:
    """The daemon of a stream."""

    sizes: Sizes
    model: CostModel
    self_heal: bool = True
    has_timer: bool = True
    """Whether audits come on their own."""


class Drive:
    """Mutable: `run` serves the calls, once; a fault is put in by `at`."""

    def __init__(self, calls: Sequence[Call], setting: Setting, observer: Observer) -> None:
        trace = ConversationTrace("stream", calls)
        self._setting = setting
        self._observer = observer
        self._scale: Scale = scale_of(trace.tokens_per_symbol, setting.sizes.page_tokens, setting.model)
        options = replace(cache_options(setting.sizes, self._scale, setting.model), self_heal=setting.self_heal)
        self.faults = Faults()
        self.cache = self._new_cache(options)
        self._server = SimServer(setting.sizes, self._scale, setting.model, Measurements(), self.cache)
        self._requests = trace.requests()
        self._next: SimRequest | None = next(self._requests, None)
        self._queues: dict[str, deque[SimRequest]] = {}
        self._audited_at = 0.0
        self._ticked_at = 0.0
        self._has_worked = False
        self._last_arrival = calls[-1].at_seconds if calls else 0.0
        self.namespaces = sorted({call.namespace for call in calls})
        self._plans: list[tuple[float, Callable[[Drive], None]]] = []

    @property
    def now(self) -> float:
        return self._server.now

    @property
    def checkpoint_slots(self) -> int:
        """Device slots beyond those that requests run in."""
        return self._setting.sizes.device_state_slots

    def at(self, seconds: float, what: Callable[[Drive], None]) -> None:
        """Do something to the daemon then."""
        self._plans.append((seconds, what))
        self._plans.sort(key=lambda plan: plan[0])

    def run(self) -> None:
        while not self._observer.is_over and self._turn():
            pass

    def audit(self) -> None:
        report = audit(self.cache)
        self._audited_at = self.now
        self._has_worked = False
        self._observer.audited(AuditDone(report, 0.0), self.now)

    def _new_cache(self, options: CacheOptions) -> ContextCache:
        return ContextCache(options, faults=self.faults, on_reuse=self._decided)

    def _decided(self, lease: RequestLease) -> None:
        report = _in_tokens(lease.report, self._scale.tokens_per_symbol)
        decided = ReuseDecided(lease.request_id, lease.namespace, report)
        self._observer.saw(decided, self.now, host_state_counts(self.cache))

    def _turn(self) -> bool:
        server = self._server
        while self._plans and self._plans[0][0] <= server.now:
            self._plans.pop(0)[1](self)
        while self._next is not None and self._next.arrival_seconds <= server.now:
            self._arrive(self._next)
            self._next = next(self._requests, None)
        if self._next is None and (server.is_idle or server.now > self._last_arrival + _PATIENCE_SECONDS):
            return False
        self._tick_if_due()
        step = _IDLE_TICK_SECONDS if server.is_idle else _TICK_SECONDS
        arrival = self._next.arrival_seconds if self._next is not None else server.now + step
        server.advance(min(arrival, self._ticked_at + step))
        while server.answered:
            self._has_worked = True
            self._follow(server.answered.popleft().request.thread)
        return True

    def _tick_if_due(self) -> None:
        server, now = self._server, self._server.now
        is_idle = server.is_idle
        if self._setting.has_timer:
            pause = _IDLE_AUDIT_SECONDS if is_idle and self._has_worked else AUDIT_SECONDS
            if now - self._audited_at >= pause and (self._has_worked or not is_idle):
                self.audit()
        if now >= self._ticked_at + _TICK_SECONDS:
            self._ticked_at = now
            if self._observer.tick(self._snapshot(), now):
                self.audit()

    def _arrive(self, request: SimRequest) -> None:
        if request.thread in self._queues:
            self._queues[request.thread].append(request)
        else:
            self._send(request)

    def _send(self, request: SimRequest) -> None:
        self._queues.setdefault(request.thread, deque())
        if not self._server.submit(request, 0):
            self._follow(request.thread)

    def _follow(self, thread: str) -> None:
        queue = self._queues[thread]
        if queue:
            self._send(queue.popleft())
        else:
            del self._queues[thread]

    def _snapshot(self) -> EngineSnapshot:
        server, cache = self._server, self.cache
        return EngineSnapshot(
            status=EngineStatus.RUNNING,
            heartbeat_age_seconds=0.0,
            running=server.prefilling + server.decoding,
            waiting=server.waiting,
            restoring=0,
            prefilling=server.prefilling,
            decoding=server.decoding,
            kv_pages=cache.pages.counts(),
            state_slots=cache.slots.counts(),
            host_units=cache.host.counts(),
            host_state_slots=host_state_counts(cache),
            cache=cache.stats,
            transfers={},
            restore_bytes_per_second=cache.costs.restore_bytes_per_second,
            prefill_tokens_per_second=cache.costs.prefill_tokens_per_second,
            last_audit=None,
            steps_total=0,
            prefill_tokens_total=0,
            decode_tokens_total=0,
            suspensions_total=0,
            recomputed_tokens_total=0,
            step_failures_total=0,
            consecutive_step_failures=0,
            loop_restarts_total=0,
            step_seconds={},
            step_overhead_seconds=DistributionView((1.0,), (0, 0), 0.0),
            oldest_entry_seconds={},
        )


def _in_tokens(report: ReuseReport, tokens: int) -> ReuseReport:
    return replace(
        report,
        prompt_tokens=report.prompt_tokens * tokens,
        cached_tokens=report.cached_tokens * tokens,
        achievable_tokens=report.achievable_tokens * tokens,
        expected_tokens=report.expected_tokens * tokens,
        fault_tokens=report.fault_tokens * tokens,
        bet_tokens=report.bet_tokens * tokens,
        source={tier: each * tokens for tier, each in report.source.items()},
        lost={reason: each * tokens for reason, each in report.lost.items()},
        diverged_at=None if report.diverged_at is None else report.diverged_at * tokens,
    )
