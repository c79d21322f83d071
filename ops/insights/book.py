"""The book of insights: fed with what happens, asked once a second what is to be said."""

from __future__ import annotations

from collections.abc import Callable

from engine.events import AuditDone, CacheReset, LoopRestarted, RequestEnded, ReuseDecided, StepFailed
from engine.snapshot import EngineSnapshot
from ops.events import InsightCleared, InsightOpened
from ops.insights.reuse import Reuse
from ops.insights.rules.base import DEFAULT_URL, Facts, Rule
from ops.insights.rules.books import LedgerViolation
from ops.insights.rules.clients import HistoryRewritten
from ops.insights.rules.drill import FireDrill, while_drilled
from ops.insights.rules.faults import EngineFaults
from ops.insights.rules.latency import (
    Preempted,
    PrefillDominated,
    QueuedBehindConcurrency,
    QueueSaturated,
    StalledBehindPrompts,
)
from ops.insights.rules.memory import CapacitySmall, StructuralFloor
from ops.insights.rules.pools import EvictionCliff, PoolPinned
from ops.insights.rules.tier import TierInert
from ops.insights.types import Finding, Insight, InsightId, ReuseState

Change = InsightOpened | InsightCleared


class Insights:
    """Everything that is to be said at a moment. Mutable: only the event loop's thread may touch it.

    `now` is on the monotonic clock and never goes back; `unix_time` tells since when something holds.
    """

    def __init__(self, unix_time: Callable[[], float], facts: Facts | None = None) -> None:
        self._unix_time = unix_time
        self._url = DEFAULT_URL if facts is None else facts.url
        self._reuse = Reuse()
        self._pinned, self._ledger = PoolPinned(), LedgerViolation()
        self._rules: tuple[Rule, ...] = (
            self._pinned,
            self._ledger,
            CapacitySmall(facts),
            StructuralFloor(),
            TierInert(),
            EvictionCliff(),
            HistoryRewritten(),
            QueueSaturated(facts),
            QueuedBehindConcurrency(facts),
            StalledBehindPrompts(),
            Preempted(),
            PrefillDominated(),
            EngineFaults(),
            FireDrill(),
        )
        self._active: dict[InsightId, Insight] = {}
        self._opened_at: dict[InsightId, float] = {}

    @property
    def active(self) -> tuple[Insight, ...]:
        """What holds, the latest figures in it; what reuse has to say first."""
        return tuple(self._active[each] for each in InsightId if each in self._active)

    @property
    def reuse(self) -> ReuseState:
        """Of the namespace that fares worst."""
        return self._reuse.state

    @property
    def wants_audit(self) -> bool:
        """Whether the books should be compared now; until `saw_audit` tells that they were."""
        return self._reuse.wants_audit

    def saw_reuse(self, decided: ReuseDecided, now: float) -> None:
        self._reuse.saw_reuse(decided, now)
        for rule in self._rules:
            rule.saw_reuse(decided.reuse, now)

    def saw_end(self, ended: RequestEnded, endpoint: str, now: float) -> None:
        """`endpoint` is not asked for yet: no rule tells one from another."""
        for rule in self._rules:
            rule.saw_end(ended, now)

    def saw_audit(self, done: AuditDone, now: float) -> None:
        for rule in self._rules:
            rule.saw_audit(done.report, now)
        self._reuse.saw_audit(done.report, now)

    def saw_reset(self, reset: CacheReset, now: float) -> None:
        for rule in self._rules:
            rule.saw_reset(reset.tiers, now)
        self._reuse.saw_reset(now, is_leaking=self._ledger.remains)

    def saw_step_failure(self, failure: StepFailed, now: float) -> None:
        for rule in self._rules:
            rule.saw_step_failure(failure, now)

    def saw_restart(self, restart: LoopRestarted, now: float) -> None:
        """What is cold after it is no collapse: the past is forgotten."""
        for rule in self._rules:
            rule.saw_restart(restart, now)
        self._reuse = Reuse()

    def saw_rejection(self, code: str, now: float) -> None:
        for rule in self._rules:
            rule.saw_rejection(code, now)

    def evaluate(self, snapshot: EngineSnapshot, now: float) -> list[Change]:
        """What has changed since the last time; to be asked about once a second."""
        found: dict[InsightId, Finding] = {}
        for rule in self._rules:
            finding = rule.judge(snapshot, now, is_open=rule.id in self._active)
            if finding is not None:
                found[rule.id] = finding
        is_leaking = self._ledger.remains or InsightId.POOL_PINNED in found
        found |= self._reuse.judge(snapshot, now, is_leaking=is_leaking)
        if snapshot.faults:
            found = while_drilled(found, snapshot.faults)
        return self._update(found, now)

    def _update(self, found: dict[InsightId, Finding], now: float) -> list[Change]:
        changes: list[Change] = []
        for each in [each for each in self._active if each not in found]:
            changes.append(InsightCleared(self._active.pop(each), round(now - self._opened_at.pop(each), 3)))
        unix_ms = round(self._unix_time() * 1000)
        for each, finding in found.items():
            before = self._active.get(each)
            since_unix_ms = unix_ms if before is None else before.since_unix_ms
            self._active[each] = insight = _insight(each, finding, since_unix_ms, self._url)
            if before is None:
                self._opened_at[each] = now
                changes.append(InsightOpened(insight))
        return changes


def _insight(insight_id: InsightId, finding: Finding, since_unix_ms: int, url: str) -> Insight:
    return Insight(
        id=insight_id,
        severity=finding.severity,
        title=finding.title,
        statement=finding.statement,
        evidence=finding.evidence,
        measured_over=finding.measured_over,
        since_unix_ms=since_unix_ms,
        recommendation=finding.recommendation.replace(DEFAULT_URL, url),
    )
