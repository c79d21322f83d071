"""What an operator may ask of the cache while traffic runs, as work for the loop to do between two steps."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from cache import Tier
from engine.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class TierReset:
    """What a reset dropped from one tier, and what it had to leave."""

    checkpoints: int = 0
    units: Mapping[str, int] = field(default_factory=dict)
    """Units that are free again, by pool."""
    pinned_checkpoints: int = 0
    """Left where they are, because requests or copies use them."""


@dataclass(frozen=True, slots=True)
class AuditResult:
    """`violations`: one line each, empty when every unit is accounted for."""

    violations: tuple[str, ...]


def reset_cache(scheduler: Scheduler, tiers: Collection[Tier]) -> dict[Tier, TierReset]:
    """Drop what is remembered in `tiers` and nobody uses at this moment."""
    cache = scheduler.cache
    answer = dict.fromkeys(tiers, TierReset())
    if Tier.DEVICE in answer:
        free = {pool: pool.free for pool in (cache.pages, cache.slots)}
        dropped = cache.reset()
        units = {pool.name: pool.free - before for pool, before in free.items()}
        answer[Tier.DEVICE] = TierReset(dropped, units, len(cache.retention.store))
    return answer


def audit_cache(scheduler: Scheduler) -> AuditResult:
    """Compare pools, trees, leases and sequences from scratch."""
    return AuditResult(tuple(scheduler.check()))
