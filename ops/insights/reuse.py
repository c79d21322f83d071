"""The collapse detector as a whole: every namespace's watch, the pools' pressure, and the audits that it asks for."""

from __future__ import annotations

from cache import AuditReport
from engine.events import ReuseDecided
from engine.snapshot import EngineSnapshot
from ops.insights.reuse_scopes import ReuseScopes
from ops.insights.reuse_watch import Books
from ops.insights.rules.reuse import AuditNote, say_reuse
from ops.insights.types import Finding, InsightId, ReuseState

_ANSWER_SECONDS = 5.0
"""An audit that was asked for and has not come by then will not come."""
_PAUSE_SECONDS = 60.0
"""Between an audit that was asked for and found nothing, and the next one: it stops every stream for a moment."""


class Reuse:
    """Mutable: only the event loop's thread may touch it. A new one knows of nothing, as is right after a restart."""

    def __init__(self) -> None:
        self._scopes = ReuseScopes()
        self._note = AuditNote()
        self._is_host_full = False
        self._is_leaking = False
        self._suspicious_since: float | None = None
        self._is_sound = False
        """Whether an audit has found nothing amiss since then."""
        self._asked_at = 0.0
        self._rests_until = 0.0

    @property
    def state(self) -> ReuseState:
        return self._scopes.state

    @property
    def wants_audit(self) -> bool:
        return self._note.is_wanted

    def saw_reuse(self, decided: ReuseDecided, now: float) -> None:
        self._scopes.saw(decided.namespace, decided.reuse, now, is_host_full=self._is_host_full)
        self._judge(now)

    def saw_audit(self, report: AuditReport, now: float) -> None:
        """Units that were given back may have been the cause."""
        was_wanted = self._note.is_wanted
        is_healed = any(report.reclaimed.values()) and not report.remaining
        if was_wanted or report.violations:
            self._note.came(report.reclaimed, report.violations, report.remaining)
        if was_wanted and not report.violations:
            self._rests_until = now + _PAUSE_SECONDS
        if self._suspicious_since is not None and not report.remaining:
            self._is_sound = True
        if report.remaining:
            self._is_sound = False
        if is_healed:
            self._scopes.relieve(now)
        self._judge(now)

    def saw_reset(self, now: float, *, is_leaking: bool) -> None:
        """The tiers are empty and whole: what is lost from now on is lost anew."""
        self._scopes.relieve(now)
        if is_leaking:
            self._ask(now)
        self._judge(now)

    def judge(self, snapshot: EngineSnapshot, now: float, *, is_leaking: bool) -> dict[InsightId, Finding]:
        """One insight at most: that of the worst state."""
        host = snapshot.host_state_slots
        self._is_host_full = host.capacity > 0 and host.free <= 1
        self._is_leaking = is_leaking
        self._scopes.leak(now, is_leaking=is_leaking)
        self._judge(now)
        state = self.state
        if state is ReuseState.HEALTHY:
            return {}
        watches, scopes = self._scopes.worst_watches()
        finding = say_reuse(watches, scopes, snapshot, self._note)
        is_degraded = state is ReuseState.DEGRADED
        return {InsightId.REUSE_DEGRADED if is_degraded else InsightId.REUSE_COLLAPSED: finding}

    def _judge(self, now: float) -> None:
        """What all seen so far calls for; an audit first of all, for it tells a leak from a lack of memory."""
        if not self._scopes.is_suspicious:
            self._suspicious_since, self._is_sound = None, False
        elif self._suspicious_since is None:
            self._suspicious_since = now
            if now < self._rests_until:
                self._is_sound = True
            else:
                self._ask(now)
        before = self.state
        self._scopes.judge(now, self._books(now))
        if self.state is not before and self.state in (ReuseState.DEGRADED, ReuseState.COLLAPSED):
            self._ask(now)

    def _books(self, now: float) -> Books:
        if self._is_leaking:
            return Books.DOUBTFUL
        if self._suspicious_since is None:
            return Books.UNKNOWN
        if self._is_sound:
            return Books.SOUND
        return Books.UNKNOWN if self._note.is_wanted and now - self._asked_at < _ANSWER_SECONDS else Books.DOUBTFUL

    def _ask(self, now: float) -> None:
        if not self._note.is_wanted:
            self._asked_at = now
        self._note.want()
