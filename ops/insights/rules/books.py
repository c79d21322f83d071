"""What audits find in the books of the pools."""

from __future__ import annotations

import re
from collections import Counter

from cache import AuditReport
from engine.events import LoopRestarted
from engine.snapshot import EngineSnapshot
from ops.insights.rules.base import Rule, admin, counted
from ops.insights.rules.pools import POOL_NAMES
from ops.insights.types import Finding, InsightId, Severity

_HEALED_HELD_SECONDS = 600.0
_POOL = re.compile(r"pool '(\w+)'")


class LedgerViolation(Rule):
    """Open while a violation remains, and for ten minutes after one was mended. The lines of a report are never shown:
    they may name what a client chose."""

    id = InsightId.LEDGER_VIOLATION

    def __init__(self) -> None:
        self._remaining: tuple[str, ...] = ()
        self._healed: Counter[str] = Counter()
        self._healed_at: float | None = None

    @property
    def remains(self) -> bool:
        """Whether the last audit left something unmended."""
        return bool(self._remaining)

    @property
    def pools(self) -> frozenset[str]:
        """Those that the violations which remain are about."""
        return pools_in(self._remaining)

    def saw_audit(self, report: AuditReport, now: float) -> None:
        self._remaining = report.remaining
        if report.violations and not report.remaining:
            if self._healed_at is None or now - self._healed_at >= _HEALED_HELD_SECONDS:
                self._healed.clear()
            self._healed_at = now
            self._healed.update(report.reclaimed)

    def saw_restart(self, restart: LoopRestarted, now: float) -> None:
        self._remaining = ()
        self._healed_at = None

    def judge(self, snapshot: EngineSnapshot, now: float, *, is_open: bool) -> Finding | None:
        if self._remaining:
            where = ", ".join(POOL_NAMES[pool] for pool in sorted(self.pools) if pool in POOL_NAMES)
            number = len(self._remaining)
            return Finding(
                severity=Severity.WARNING,
                title="The books of the pools do not add up",
                statement=f"The last audit found {counted(number, 'violation')}{f', of {where}' if where else ''}, "
                "which nothing has mended. Units that nobody holds are lost until they are given back.",
                evidence={"violations_remaining": number},
                measured_over={"audits": 1},
                recommendation="Give back what nobody holds, without a restart: "
                + admin("/admin/cache/reset", '{"tiers":["device","host"]}')
                + "; start without --no-self-heal so that audits do it themselves.",
            )
        if self._healed_at is None or now - self._healed_at >= _HEALED_HELD_SECONDS:
            return None
        units = sum(self._healed.values())
        where = ", ".join(f"{count:,} {POOL_NAMES.get(pool, pool)}" for pool, count in sorted(self._healed.items()))
        return Finding(
            severity=Severity.NOTICE,
            title="An audit found units that nobody held, and gave them back",
            statement=f"{where or 'Entries of the books'} had no owner any more and are in use again. Until then there "
            "was so much less room. This must not happen: something does not give back what it took.",
            evidence={"units_given_back": units, **dict(sorted(self._healed.items()))},
            measured_over={"seconds": _HEALED_HELD_SECONDS},
            recommendation="Nothing to do now. If it comes again, keep the event log around the audit and report it.",
        )


def pools_in(lines: tuple[str, ...]) -> frozenset[str]:
    """The pools that lines of an audit are about."""
    return frozenset(name for line in lines for name in _POOL.findall(line))
