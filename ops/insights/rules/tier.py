"""Host memory that is written and never read."""

from __future__ import annotations

from cache import LossReason, ReuseReport, Tier
from engine.events import LoopRestarted
from engine.snapshot import EngineSnapshot
from ops.insights.rules.base import Rule, counted
from ops.insights.types import Finding, InsightId, Severity

_LEAST_SECONDS = 300.0
_LEAST_WRITES = 16
_LEAST_CHANCES = 12
_GONE_FROM_DEVICE = (LossReason.EVICTED_STATE, LossReason.EVICTED_KV, LossReason.STRUCTURAL, LossReason.RESTORE_FAILED)


class TierInert(Rule):
    """Counts since the last read, so a young daemon has nothing to say; nor has one whose device holds all that is
    asked for, for then host memory has no chance."""

    id = InsightId.TIER_INERT

    def __init__(self) -> None:
        self._since: float | None = None
        self._written_before = 0
        self._restores_before = 0
        self._chances = 0

    def saw_reuse(self, report: ReuseReport, now: float) -> None:
        if report.source.get(Tier.HOST, 0) > 0:
            self._since = None
        elif 2 * sum(report.lost.get(reason, 0) for reason in _GONE_FROM_DEVICE) > report.achievable_tokens:
            self._chances += 1

    def saw_reset(self, tiers: tuple[Tier, ...], now: float) -> None:
        self._since = None

    def saw_restart(self, restart: LoopRestarted, now: float) -> None:
        self._since = None

    def judge(self, snapshot: EngineSnapshot, now: float, *, is_open: bool) -> Finding | None:
        written = snapshot.cache.checkpoints_demoted
        if self._since is None or snapshot.cache.restores != self._restores_before:
            self._since, self._written_before = now, written
            self._restores_before, self._chances = snapshot.cache.restores, 0
        writes, seconds = written - self._written_before, now - self._since
        if seconds < _LEAST_SECONDS or writes < _LEAST_WRITES or self._chances < _LEAST_CHANCES:
            return None
        return Finding(
            severity=Severity.NOTICE,
            title="Host memory is written and never read",
            statement=f"In {seconds / 60:.0f} minutes {counted(writes, 'checkpoint was', 'checkpoints were')} copied "
            f"to host memory and none came back, though {counted(self._chances, 'request')} asked for something that "
            "had left the device.",
            evidence={"checkpoints_written": writes, "restores": 0, "requests_with_a_chance": self._chances},
            measured_over={"seconds": round(seconds), "requests": self._chances},
            recommendation="Compare `dalsegno_cache_restore_bytes_per_second` with "
            "`dalsegno_cache_prefill_tokens_per_second`: where copying back is slower than computing, a smaller "
            "--host-cache-mib frees memory for nothing lost; otherwise give it more, for what is asked again does not "
            "live long enough there.",
        )
