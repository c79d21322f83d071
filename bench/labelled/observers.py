"""Who watches a labelled stream: this daemon's insights, and the rule of the supervisor that missed the failure."""

from __future__ import annotations

from cache import ROOT_PATH, PoolCounts
from engine.events import AuditDone, ReuseDecided
from engine.snapshot import EngineSnapshot
from ops.events import InsightOpened
from ops.insights.book import Insights
from ops.insights.rules.base import Facts
from ops.insights.types import InsightId, ReuseState

ALARMS = frozenset(
    {
        InsightId.REUSE_COLLAPSED,
        InsightId.REUSE_DEGRADED,
        InsightId.POOL_PINNED,
        InsightId.LEDGER_VIOLATION,
        InsightId.EVICTION_CLIFF,
        InsightId.ENGINE_FAULTS,
    }
)
"""Those that say that something is broken; the others tell of memory, clients and load."""
ROOTS_IN_A_ROW = 5
"""Of the supervisor's rule."""


class Watched:
    """Our insights on one stream. Mutable."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self.insights = Insights(lambda: 0.0, facts)
        self.opened: list[tuple[float, InsightId]] = []
        self.states: list[tuple[float, ReuseState]] = []
        """Each state that reuse came to, and when."""

    def restart(self) -> None:
        self.insights = Insights(lambda: 0.0, self._facts)

    def saw(self, decided: ReuseDecided, now: float) -> None:
        self.insights.saw_reuse(decided, now)
        self._note(now)

    def audited(self, done: AuditDone, now: float) -> None:
        self.insights.saw_audit(done, now)
        self._note(now)

    def tick(self, snapshot: EngineSnapshot, now: float) -> bool:
        for change in self.insights.evaluate(snapshot, now):
            if isinstance(change, InsightOpened):
                self.opened.append((now, change.insight.id))
        self._note(now)
        return self.insights.wants_audit

    def _note(self, now: float) -> None:
        state = self.insights.reuse
        before = self.states[-1][1] if self.states else ReuseState.HEALTHY
        if state is not before:
            self.states.append((now, state))


class Supervisor:
    """Alarms when host state slots stand at the maximum exactly and so many requests in a row began at the root; any
    hit clears. Mutable."""

    def __init__(self) -> None:
        self.is_alarmed = False
        self.alarms: list[float] = []
        self.clears: list[float] = []
        self._roots = 0

    def saw(self, decided: ReuseDecided, now: float, host_states: PoolCounts) -> None:
        self._roots = self._roots + 1 if decided.reuse.path == ROOT_PATH else 0
        is_full = host_states.capacity > 0 and host_states.free == 0
        if not self._roots and self.is_alarmed:
            self.is_alarmed = False
            self.clears.append(now)
        elif not self.is_alarmed and is_full and self._roots >= ROOTS_IN_A_ROW:
            self.is_alarmed = True
            self.alarms.append(now)
