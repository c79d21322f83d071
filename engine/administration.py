"""What an operator may ask of the cache while traffic runs, as work for the loop to do between two steps."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from cache import Tier
from engine.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class TierReset:
    """What a reset dropped from one tier, and what it had to leave because a request was being resumed from it."""

    checkpoints: int
    kv_pages: int
    state_slots: int
    pinned_checkpoints: int


@dataclass(frozen=True, slots=True)
class AuditResult:
    """`violations`: one line each, empty when every unit is accounted for."""

    violations: tuple[str, ...]


def reset_cache(scheduler: Scheduler, tiers: Collection[Tier]) -> dict[Tier, TierReset]:
    """Drop what is remembered in `tiers` and nobody uses at this moment."""
    cache = scheduler.cache
    nothing = TierReset(0, 0, 0, 0)
    answer = dict.fromkeys(tiers, nothing)
    if Tier.DEVICE in answer:
        pages, slots = cache.pages.counts().cached, cache.slots.counts().cached
        dropped = cache.reset()
        answer[Tier.DEVICE] = TierReset(
            checkpoints=dropped,
            kv_pages=pages - cache.pages.counts().cached,
            state_slots=slots - cache.slots.counts().cached,
            pinned_checkpoints=len(cache.retention.store),
        )
    return answer


def audit_cache(scheduler: Scheduler) -> AuditResult:
    """Compare pools, trees, leases and sequences from scratch."""
    return AuditResult(tuple(scheduler.check()))
