"""What is to be said when reuse degrades or collapses: what was lost, whether an audit helped, what to reset."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from cache import LossReason, Tier
from engine.snapshot import EngineSnapshot
from ops.insights.reuse_watch import Cause, ReuseWatch
from ops.insights.rules.base import admin, counted
from ops.insights.rules.books import pools_in
from ops.insights.rules.pools import POOL_NAMES
from ops.insights.types import Finding, Measured, ReuseState, Severity

_WHY = {
    LossReason.PUBLISH_SKIPPED: "what was computed was not kept",
    LossReason.RESTORE_FAILED: "copies from host memory failed",
    LossReason.EVICTED_STATE: "states were dropped",
    LossReason.EVICTED_KV: "KV pages were dropped",
    LossReason.COLD: "what was kept was not found again",
    LossReason.NO_CHECKPOINT: "no checkpoint was there",
    LossReason.STRUCTURAL: "what is there was not used",
}

_HOST_POOLS = frozenset({"host_units", "host_state_slots"})


class AuditNote:
    """What the audit after an alarm said. Mutable."""

    def __init__(self) -> None:
        self.is_wanted = False
        self.has_come = False
        self.reclaimed: dict[str, int] = {}
        self.pools: frozenset[str] = frozenset()
        self.remaining = 0

    def want(self) -> None:
        self.is_wanted, self.has_come = True, False
        self.reclaimed, self.pools, self.remaining = {}, frozenset(), 0

    def came(self, reclaimed: dict[str, int], violations: tuple[str, ...], remaining: tuple[str, ...]) -> None:
        self.is_wanted, self.has_come = False, True
        self.reclaimed = {pool: units for pool, units in reclaimed.items() if units}
        self.pools, self.remaining = pools_in(violations), len(remaining)

    @property
    def is_sound(self) -> bool:
        """Whether it found nothing amiss."""
        return self.has_come and not (self.reclaimed or self.pools or self.remaining)

    def tell(self) -> str:
        """One sentence."""
        if not self.has_come:
            return "An audit is under way." if self.is_wanted else ""
        if self.reclaimed:
            units = ", ".join(f"{count:,} {POOL_NAMES.get(pool, pool)}" for pool, count in self.reclaimed.items())
            return f"An audit gave back what nobody held: {units}."
        if self.remaining:
            return f"An audit found {counted(self.remaining, 'violation')} and could not mend them."
        return "An audit found nothing amiss in the books."


def say_reuse(watches: Sequence[ReuseWatch], scopes: int, snapshot: EngineSnapshot, note: AuditNote) -> Finding:
    """Of the watches that are in the worst state; the first of them has the most to tell."""
    watch = watches[0]
    if watch.state is ReuseState.RECOVERING:
        return _say_recovering(watch, note)
    recommendation = _reset(_to_blame(_reasons(watch), snapshot, note))
    if watch.cause is Cause.LEAK and watch.state is ReuseState.DEGRADED:
        return _say_leak(snapshot, note, recommendation)
    is_collapsed = watch.state is ReuseState.COLLAPSED
    return Finding(
        severity=Severity.CRITICAL if is_collapsed else Severity.WARNING,
        title="Reuse has collapsed" if is_collapsed else "Less of the prompts is reused than should be",
        statement=_say_lost(watch, scopes, note),
        evidence=_evidence(watch),
        measured_over=_measured_over(watch),
        recommendation=recommendation,
    )


def _say_lost(watch: ReuseWatch, scopes: int, note: AuditNote) -> str:
    chances = watch.recent
    losses = [each for each in chances if each.is_noticeable]
    expected, lost = sum(each.expected_tokens for each in chances), sum(each.lost_tokens for each in chances)
    fault = sum(each.fault_tokens for each in losses)
    reasons = _reasons(watch)
    main = next(iter(reasons.most_common(1)), ("", 0))[0]
    is_fault = 2 * fault > lost
    has_given_way = main in (LossReason.EVICTED_STATE, LossReason.EVICTED_KV) and note.is_sound and not is_fault
    parts = (
        f"Of the last {counted(len(chances), 'request')} that could have reused something, {len(losses):,} lost part "
        f"or all of it: {lost:,} of {expected:,} tokens that should have been there were computed again.",
        f"This holds for {counted(scopes, 'group')} of clients that share nothing with others." if scopes else "",
        _because(reasons),
        "Nothing had needed the room: this is the daemon's own fault." * is_fault,
        note.tell(),
        "The pools are full of what others have left: it is kept in place of what is asked for." * has_given_way,
    )
    return " ".join(part for part in parts if part)


def _say_recovering(watch: ReuseWatch, note: AuditNote) -> Finding:
    good = watch.good_in_a_row
    return Finding(
        severity=Severity.NOTICE,
        title="Prompts are being reused again" if good else "What made reuse collapse may be gone",
        statement=(
            f"After a collapse the last {counted(good, 'request')} that could reuse something did. {note.tell()}"
            if good
            else f"Since then no request has shown whether prompts are reused again. {note.tell()}"
        ).strip(),
        evidence=_evidence(watch) | {"hits_in_a_row": good},
        measured_over=_measured_over(watch),
        recommendation="Nothing to do; this clears by itself when reuse holds.",
    )


def _say_leak(snapshot: EngineSnapshot, note: AuditNote, recommendation: str) -> Finding:
    return Finding(
        severity=Severity.WARNING,
        title="Memory for reuse is leaking away",
        statement="Units of a pool are held by nobody, or by requests that are gone, and do not come back. Reuse "
        f"goes on until the pool is empty. {note.tell()}".strip(),
        evidence={f"{pool}_free": counts.free for pool, counts in snapshot.pools.items() if counts.capacity},
        measured_over={"seconds": 1},
        recommendation=recommendation,
    )


def _evidence(watch: ReuseWatch) -> dict[str, int | float | str]:
    chances = watch.recent
    if not chances:
        return {}
    return {
        "requests_that_could_have_hit": len(chances),
        "requests_that_lost": sum(each.is_noticeable for each in chances),
        "expected_tokens": sum(each.expected_tokens for each in chances),
        "lost_tokens": sum(each.lost_tokens for each in chances),
        "fault_tokens": sum(each.fault_tokens for each in chances),
        "losses_in_a_row": watch.losses_in_a_row,
        **{f"lost_{reason}_tokens": tokens for reason, tokens in _reasons(watch).most_common()},
    }


def _measured_over(watch: ReuseWatch) -> Measured:
    return {"requests": len(watch.recent)} if watch.recent else {}


def _reasons(watch: ReuseWatch) -> Counter[str]:
    found: Counter[str] = Counter()
    for chance in watch.recent:
        if chance.is_noticeable and chance.reason:
            found[chance.reason] += chance.lost_tokens
    return found


def _because(reasons: Counter[str]) -> str:
    known = [_WHY[LossReason(reason)] for reason, _ in reasons.most_common(1) if reason in _WHY]
    return f"Most of it because {known[0]}." if known else ""


def _to_blame(reasons: Counter[str], snapshot: EngineSnapshot, note: AuditNote) -> tuple[Tier, ...]:
    """Where what nobody can use takes the room, as far as it can be told."""
    if note.pools:
        is_host, is_device = note.pools & _HOST_POOLS, note.pools - _HOST_POOLS
        return (*((Tier.DEVICE,) if is_device else ()), *((Tier.HOST,) if is_host else ()))
    main = next(iter(reasons.most_common(1)), ("", 0))[0]
    if main == LossReason.RESTORE_FAILED:
        return (Tier.HOST,)
    if main in (LossReason.PUBLISH_SKIPPED, LossReason.COLD):
        return (Tier.DEVICE,)
    host = snapshot.host_state_slots
    if main == LossReason.EVICTED_STATE and host.capacity and host.free <= 1:
        return (Tier.HOST,)
    return (Tier.DEVICE, Tier.HOST) if snapshot.host_units.capacity else (Tier.DEVICE,)


def _reset(tiers: tuple[Tier, ...]) -> str:
    names = ",".join(f'"{tier.value}"' for tier in tiers or (Tier.DEVICE, Tier.HOST))
    command = admin("/admin/cache/reset", f'{{"tiers":[{names}]}}')
    return (
        f"Reset what is to blame, while requests go on: {command}. If reuse does not come back within some requests, "
        "restart the daemon and keep the event log."
    )
