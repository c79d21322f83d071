"""Clients that change what they have sent before."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from cache import LossReason, ReuseReport
from engine.events import LoopRestarted
from engine.snapshot import EngineSnapshot
from ops.insights.recent import Recent
from ops.insights.rules.base import Rule, counted
from ops.insights.types import Finding, InsightId, Severity

_WINDOW_SECONDS = 1800.0
_LAST = 50
_LEAST_DIVERGED = 5
_LEAST_PLACES = 3
"""Forks of one conversation all depart at one place; a rewritten history departs further on each time."""
_OPENS_AT, _CLEARS_AT = 0.3, 0.1


@dataclass(frozen=True, slots=True)
class _Ask:
    diverged_at: int | None
    lost: int


class HistoryRewritten(Rule):
    """Looks at the last requests that went on with something known."""

    id = InsightId.HISTORY_REWRITTEN

    def __init__(self) -> None:
        self._recent: Recent[_Ask] = Recent(_WINDOW_SECONDS, _LAST)

    def saw_reuse(self, report: ReuseReport, now: float) -> None:
        if report.achievable_tokens > 0 or report.diverged_at is not None:
            self._recent.add(_Ask(report.diverged_at, report.lost.get(LossReason.DIVERGED, 0)), now)

    def saw_restart(self, restart: LoopRestarted, now: float) -> None:
        self._recent.clear()

    def judge(self, snapshot: EngineSnapshot, now: float, *, is_open: bool) -> Finding | None:
        asks = self._recent.items(now)
        places = [ask.diverged_at for ask in asks if ask.diverged_at is not None]
        if is_open:
            holds = len(places) > _CLEARS_AT * len(asks)
        else:
            enough = len(places) >= _LEAST_DIVERGED and len(set(places)) >= _LEAST_PLACES
            holds = enough and len(places) >= _OPENS_AT * len(asks)
        if not holds:
            return None
        lost, place, latest = sum(ask.lost for ask in asks), round(statistics.median(places)), places[-1]
        return Finding(
            severity=Severity.NOTICE,
            title="Clients send a history that differs from what they sent before",
            statement=f"{len(places):,} of the last {counted(len(asks), 'request')} that went on with a known "
            f"conversation changed an earlier part of it; {lost:,} tokens were computed again. The latest change began "
            f"at token {latest:,}, the middle one at token {place:,}. Often a proxy adds a message or a date that is "
            "not there the next time.",
            evidence={
                "requests_that_diverged": len(places),
                "diverged_tokens": lost,
                "diverged_at_latest": latest,
                "diverged_at_median": place,
            },
            measured_over={"requests": len(asks), "seconds": round(self._recent.span_seconds(now))},
            recommendation="Compare two bodies of one conversation at `diverged_at` (GET /admin/requests/{id}); keep "
            "what was sent unchanged, and put what changes at the end of the last message.",
        )
