"""The collapse detector as a whole: every namespace's watch, the pools' pressure, and the audits that it asks for."""

from __future__ import annotations

from cache import AuditReport
from engine.events import ReuseDecided
from engine.snapshot import EngineSnapshot
from ops.insights.reuse_scopes import ReuseScopes
from ops.insights.rules.reuse import AuditNote, say_reuse
from ops.insights.types import Finding, InsightId, ReuseState


class Reuse:
    """Mutable: only the event loop's thread may touch it."""

    def __init__(self) -> None:
        self._scopes = ReuseScopes()
        self._note = AuditNote()
        self._is_host_full = False
        self._alarmed: ReuseState = ReuseState.HEALTHY

    @property
    def state(self) -> ReuseState:
        return self._scopes.state

    @property
    def wants_audit(self) -> bool:
        return self._note.is_wanted

    def saw_reuse(self, decided: ReuseDecided, now: float) -> None:
        self._scopes.saw(decided.namespace, decided.reuse, now, is_host_full=self._is_host_full)
        self._ask_for_audit()

    def saw_audit(self, report: AuditReport, now: float) -> None:
        """Units that were given back may have been the cause."""
        if self._note.is_wanted or any(report.reclaimed.values()):
            self._note.came(report.reclaimed, report.violations, report.remaining)
        if any(report.reclaimed.values()) and not report.remaining:
            self._scopes.relieve(now)

    def saw_reset(self, now: float, *, is_leaking: bool) -> None:
        """The tiers are empty and whole: what is lost from now on is lost anew."""
        self._scopes.relieve(now)
        if is_leaking:
            self._note.want()

    def saw_restart(self) -> None:
        self.__init__()  # type: ignore[misc]

    def judge(self, snapshot: EngineSnapshot, now: float, *, is_leaking: bool) -> dict[InsightId, Finding]:
        """One insight at most: that of the worst state."""
        host = snapshot.host_state_slots
        self._is_host_full = host.capacity > 0 and host.free <= 1
        self._scopes.leak(now, is_leaking=is_leaking)
        self._scopes.passed(now)
        self._ask_for_audit()
        state = self.state
        if state is ReuseState.HEALTHY:
            return {}
        watches, scopes = self._scopes.worst_watches()
        finding = say_reuse(watches, scopes, snapshot, self._note)
        is_degraded = state is ReuseState.DEGRADED
        return {InsightId.REUSE_DEGRADED if is_degraded else InsightId.REUSE_COLLAPSED: finding}

    def _ask_for_audit(self) -> None:
        """Once when it gets worse: a leak that is found early costs nobody a conversation."""
        state = self.state
        order = (ReuseState.HEALTHY, ReuseState.RECOVERING, ReuseState.DEGRADED, ReuseState.COLLAPSED)
        if order.index(state) > order.index(self._alarmed) and state is not ReuseState.RECOVERING:
            self._note.want()
        self._alarmed = state
