"""What an operator may ask of the cache while traffic runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from cache import ContextCache, Tier, heal, oldest_entry_seconds
from engine.scheduler import Scheduler

_AGES_SECONDS = 5.0


class EntryAges:
    """How old the oldest entries of the pools are, counted anew every few seconds, for it looks at each of them.
    Mutable: only the engine loop's task may touch it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._counted_at: float | None = None
        self._seconds: Mapping[str, float] = {}

    def of(self, cache: ContextCache) -> Mapping[str, float]:
        """Seconds by pool; 0 for a pool without an entry."""
        now = self._clock()
        if self._counted_at is None or now - self._counted_at >= _AGES_SECONDS:
            self._seconds = oldest_entry_seconds(cache, now)
            self._counted_at = now
        return self._seconds


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
