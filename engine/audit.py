"""When the engine checks its own books: on a timer, after work when it is idle, and when somebody asks."""

from __future__ import annotations

import logging
from collections.abc import Callable

from cache import AuditReport, audit
from engine.events import AuditDone, Observer
from engine.scheduler import Scheduler

AUDIT_SECONDS = 30.0
IDLE_SECONDS = 1.0
_SHARE_WHEN_BUSY = 0.001
_SHARE_WHEN_IDLE = 0.01
"""Of the time that audits may take. Every stream stands still meanwhile, and with tens of thousands of pages one takes
a second."""

logger = logging.getLogger("dalsegno.engine")


class Auditor:
    """Holds the last result. Mutable: only the engine loop's task may touch it."""

    def __init__(self, clock: Callable[[], float], tell: Observer = lambda _event: None) -> None:
        self.last: AuditReport | None = None
        """None before the first."""
        self._clock = clock
        self._tell_observer = tell
        self._audited_at = clock()
        self._took_seconds = 0.0
        self._has_worked = False
        self._told: frozenset[str] = frozenset()

    def worked(self) -> None:
        """Something has happened since the last audit."""
        self._has_worked = True

    def audit_if_due(self, scheduler: Scheduler, *, is_idle: bool) -> None:
        """Check the books, unless that was done a moment ago. An idle engine does it once after its work, then as
        seldom as a busy one."""
        wait = IDLE_SECONDS if is_idle and self._has_worked else AUDIT_SECONDS
        pause = self._took_seconds / (_SHARE_WHEN_IDLE if is_idle else _SHARE_WHEN_BUSY)
        if self._clock() - self._audited_at >= max(wait, pause):
            self.audit(scheduler)

    def audit(self, scheduler: Scheduler) -> AuditReport:
        """Compare pools, trees, leases, copies and sequences from scratch; give back what nobody holds."""
        started = self._clock()
        found = audit(scheduler.cache)
        amiss = tuple(scheduler.check_sequences())
        report = AuditReport((*found.violations, *amiss), found.reclaimed, (*found.remaining, *amiss))
        scheduler.cache.stats.violations += len(amiss)
        self._log(report)
        self._audited_at = self._clock()
        self._took_seconds = self._audited_at - started
        self._has_worked = False
        self.last = report
        self._tell_observer(AuditDone(report, self._took_seconds))
        return report

    def _log(self, report: AuditReport) -> None:
        """What was healed, each time; what remains, once."""
        if report.reclaimed:
            units = ", ".join(f"{count} of {pool}" for pool, count in report.reclaimed.items())
            logger.warning("an audit gave back units that nobody held: %s", units)
        remaining = frozenset(report.remaining)
        for line in sorted(remaining - self._told):
            logger.error("an audit found: %s", line)
        self._told = remaining
