"""What an operator may ask of the cache while traffic runs, as work for the loop to do between two steps."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from cache import Tier, heal
from engine.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class TierReset:
    """What a reset dropped from one tier, and what it had to leave."""

    checkpoints: int = 0
    units: Mapping[str, int] = field(default_factory=dict)
    """Units that are free again, by pool."""
    pinned_checkpoints: int = 0
    """Left where they are, because requests or copies use them."""


def reset_cache(scheduler: Scheduler, tiers: Collection[Tier]) -> dict[Tier, TierReset]:
    """Drop what is remembered in `tiers` and nobody uses at this moment, and give back what nobody holds, also where
    audits do not."""
    cache = scheduler.cache
    pools = {Tier.DEVICE: (cache.pages, cache.slots), Tier.HOST: (cache.host,), Tier.DISK: ()}
    free = {pool.name: pool.free for each in pools.values() for pool in each}
    counts = cache.reset(tiers)
    heal(cache)
    return {
        tier: TierReset(
            checkpoints=counts[tier].dropped,
            units={pool.name: pool.free - free[pool.name] for pool in pools[tier]},
            pinned_checkpoints=counts[tier].pinned,
        )
        for tier in tiers
    }
