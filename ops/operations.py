"""Everything that is watched, in one place: what happens comes in, and events, metrics, insights and records go out."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from cache import Fault
from engine.events import (
    AuditDone,
    CacheReset,
    EngineEvent,
    LoopRestarted,
    RequestEnded,
    ReuseDecided,
    StepFailed,
)
from engine.snapshot import EngineSnapshot
from ops.changes import Changes
from ops.events import Event, PoolUnits, RequestRejected, RequestStart, ServerStart, ServerStop
from ops.health import Health, Phase, judge_health
from ops.insights.book import Insights
from ops.insights.rules.base import DEFAULT_URL, Facts
from ops.insights.types import Insight, ReuseState
from ops.journal import Journal, Sink
from ops.metrics import Metrics
from ops.requests import RecentRequests, RequestRecord
from ops.throughput import History, ThroughputMeter
from ops.translation import audit_event, terminal_event

_INSTANCE_BYTES = 8


@dataclass(frozen=True, slots=True)
class Served:
    """What is served, and with what."""

    version: str
    model: str
    architecture: str
    backend: str
    max_context_tokens: int
    page_size_tokens: int
    max_concurrency: int
    host_unit_bytes: int
    startup_seconds: float
    url: str = DEFAULT_URL
    is_cpu: bool = False
    """Whether the model is computed on the CPU."""


class Operations:
    """What an operator sees. Mutable: only the event loop's thread may touch it.

    The engine's events come to `engine_event`, those of HTTP to `request_began` and `request_rejected`; `tick` is to be
    called about once a second. Nothing here ever reaches into the engine.
    """

    def __init__(
        self,
        metrics: Metrics,
        sinks: Iterable[Sink] = (),
        *,
        interval_seconds: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
        unix_time: Callable[[], float] = time.time,
    ) -> None:
        """`interval_seconds` is what a throughput event covers."""
        self.metrics = metrics
        self.requests = RecentRequests(unix_time=unix_time)
        self.history = History()
        self.changes = Changes()
        """Of health and insights."""
        self.audit_is_due = asyncio.Event()
        """Set when `wants_audit` has become true; to be cleared by whoever sees to it."""
        self.interval_seconds = interval_seconds
        self._journal = Journal(sinks, secrets.token_hex(_INSTANCE_BYTES), unix_time)
        self._clock = clock
        self._unix_time = unix_time
        self._started_at = clock()
        self._insights = Insights(unix_time)
        self._meter: ThroughputMeter | None = None
        self.served: Served | None = None
        """None until there is an engine."""
        self._shown: object = None
        metrics.watch_insights(self)

    @property
    def active(self) -> tuple[Insight, ...]:
        """The insights that hold."""
        return self._insights.active

    @property
    def reuse(self) -> ReuseState:
        """How reuse of prompts fares, in the namespace that fares worst."""
        return self._insights.reuse

    @property
    def wants_audit(self) -> bool:
        """Whether the books should be compared now."""
        return self._insights.wants_audit

    @property
    def uptime_seconds(self) -> float:
        """Since the process began to serve probes."""
        return self._clock() - self._started_at

    def health(
        self,
        phase: Phase,
        heartbeat_age_seconds: float | None,
        faults: Iterable[Fault] = (),
        failed_steps: int = 0,
    ) -> Health:
        """`heartbeat_age_seconds` is the time since the engine loop last turned; None when there is no running
        engine. `faults` are those of a fire drill that are on; `failed_steps` have failed since one last worked."""
        return judge_health(phase, heartbeat_age_seconds, self.reuse, self.active, faults, failed_steps)

    def started(self, served: Served, snapshot: EngineSnapshot) -> None:
        """There is an engine from now on."""
        now = self._clock()
        self.served = served
        facts = Facts(served.page_size_tokens, served.max_concurrency, served.url, is_cpu=served.is_cpu)
        self._insights = Insights(self._unix_time, facts)
        self._meter = ThroughputMeter(
            host_unit_bytes=served.host_unit_bytes, interval_seconds=self.interval_seconds, now=now
        )
        self._tell(
            ServerStart(
                version=served.version,
                model=served.model,
                architecture=served.architecture,
                backend=served.backend,
                max_context_tokens=served.max_context_tokens,
                page_size_tokens=served.page_size_tokens,
                capacity=PoolUnits(
                    device_state_slots=snapshot.state_slots.capacity,
                    host_state_slots=snapshot.host_state_slots.capacity,
                    kv_pages=snapshot.kv_pages.capacity,
                    host_bytes=snapshot.host_units.capacity * served.host_unit_bytes,
                ),
                startup_seconds=served.startup_seconds,
            )
        )

    def stopped(self, reason: str, *, is_drained: bool) -> None:
        """Nothing follows."""
        self._tell(ServerStop(reason, is_drained, self._clock() - self._started_at))

    def request_began(self, request_id: str, endpoint: str, answer_ids: Iterable[str]) -> RequestRecord:
        """Its answers are in the queue; `engine_event` will tell of the end of each."""
        record = self.requests.begin(request_id, endpoint, answer_ids)
        for answer in record.answers:
            self._tell(RequestStart(request_id, answer.answer_id, endpoint))
        return record

    def request_rejected(self, request_id: str, endpoint: str, status: int, code: str | None) -> None:
        """It was turned away before it reached the queue; `endpoint` is the route's pattern."""
        self._tell(RequestRejected(request_id, endpoint, status, code))
        if code is not None:
            self._insights.saw_rejection(code, self._clock())

    def engine_event(self, event: EngineEvent) -> None:
        """The engine's observer."""
        insights, now = self._insights, self._clock()
        match event:
            case ReuseDecided():
                insights.saw_reuse(event, now)
            case RequestEnded():
                self._answer_ended(event, now)
            case AuditDone():
                insights.saw_audit(event, now)
                self._tell(audit_event(event))
            case CacheReset():
                insights.saw_reset(event, now)
            case StepFailed():
                insights.saw_step_failure(event, now)
            case LoopRestarted():
                insights.saw_restart(event, now)
        if self.wants_audit:
            self.audit_is_due.set()

    def tick(self, snapshot: EngineSnapshot, health: Health) -> None:
        """Judge how things stand, and take a sample when one is due."""
        now = self._clock()
        for change in self._insights.evaluate(snapshot, now):
            self._tell(change)
        if self._meter is not None and self._meter.is_due(now):
            sample = self._meter.sample(snapshot, now)
            self.history.add(round(self._unix_time() * 1000), sample)
            self._tell(sample)
        shown = (health.status, self.reuse, [(each.id, each.severity, each.recommendation) for each in self.active])
        if shown != self._shown:
            self._shown = shown
            self.changes.happened()

    def _answer_ended(self, ended: RequestEnded, now: float) -> None:
        """One that never began here was given up before all of its request's answers were in the queue."""
        record = self.requests.end(ended)
        if record is not None:
            self.metrics.answer_ended(ended)
            self._insights.saw_end(ended, record.endpoint, now)
            self._tell(terminal_event(ended, record.request_id, record.endpoint))

    def _tell(self, event: Event) -> None:
        if self._meter is not None:
            self._meter.saw(event)
        self._journal.tell(event)
