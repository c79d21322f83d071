"""Counts that no pool keeps: state images in host memory, which take several of its units each."""

from __future__ import annotations

from cache.context import ContextCache
from cache.pools import PoolCounts


def host_state_counts(cache: ContextCache) -> PoolCounts:
    """State images by state, against the most that host memory can hold."""
    readers = (*(lease.pinned for lease in cache.leases), *(match.checkpoint for match in cache.matches))
    pinned = len({each.number for each in readers if each is not None and each.slot is None})
    in_flight = sum(demotion.state is not None for demotion in cache.demotions.under_way)
    held, capacity = cache.tiers.host_states, cache.options.host_states
    return PoolCounts(
        capacity=capacity, free=capacity - held, cached=held - pinned - in_flight, pinned=pinned, in_flight=in_flight
    )
