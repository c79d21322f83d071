"""Who lives in the cache: ages, sizes and the conversations that it remembers; counted from scratch when asked."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from cache.checkpoints import Checkpoint
from cache.context import ContextCache
from cache.types import CheckpointKind, Tier

_POOLS = ("device_kv_pages", "device_state_slots", "host_units", "host_state_slots")


@dataclass(frozen=True, slots=True)
class Resident:
    """One conversation or shared prefix, by the checkpoint from which it would go on."""

    name: str
    kind: CheckpointKind
    tokens: int
    turns: int
    uses: int
    idle_seconds: float
    tiers: tuple[Tier, ...]


@dataclass(frozen=True, slots=True)
class Census:
    """At one moment."""

    checkpoints: int
    nodes: int
    """Pages in the trees, each once, whatever the tier; those of which only the tokens are left included."""
    ghosts: int
    """Those of which only the tokens are left."""
    depth_tokens: int
    """The deepest frontier that can be resumed."""
    largest: tuple[Resident, ...]
    """Those with the most tokens, superseded turns left out."""


def take_census(cache: ContextCache, now: float, most: int) -> Census:
    """Names at most `most` residents. Its cost grows with the number of checkpoints."""
    store, counts = cache.tiers.store, cache.tiers.ghosts.counts
    current = (each for each in store if not each.is_superseded)
    largest = heapq.nlargest(most, current, key=lambda each: (each.frontier_tokens, each.number))
    return Census(
        checkpoints=len(store),
        nodes=counts.nodes,
        ghosts=counts.ghosts,
        depth_tokens=max((each.frontier_tokens for each in store), default=0),
        largest=tuple(_resident(each, now) for each in largest),
    )


def oldest_entry_seconds(cache: ContextCache, now: float) -> dict[str, float]:
    """How long ago the entry was used that was used longest ago, by pool; 0 for a pool without one."""
    oldest: dict[str, float] = dict.fromkeys(_POOLS, now)
    for each in cache.tiers.store:
        for pool, is_there in _places(each):
            if is_there:
                oldest[pool] = min(oldest[pool], each.last_used_at)
    return {pool: max(now - used_at, 0.0) for pool, used_at in oldest.items()}


def _places(checkpoint: Checkpoint) -> tuple[tuple[str, bool], ...]:
    return (
        ("device_kv_pages", checkpoint.device_pages > 0),
        ("device_state_slots", checkpoint.slot is not None),
        ("host_units", checkpoint.is_in_host),
        ("host_state_slots", checkpoint.host_state is not None),
    )


def _resident(checkpoint: Checkpoint, now: float) -> Resident:
    here = (
        (Tier.DEVICE, checkpoint.device_pages > 0 or checkpoint.slot is not None),
        (Tier.HOST, checkpoint.is_in_host),
    )
    return Resident(
        name=checkpoint.name,
        kind=checkpoint.kind,
        tokens=checkpoint.frontier_tokens,
        turns=checkpoint.turns,
        uses=checkpoint.uses,
        idle_seconds=max(now - checkpoint.last_used_at, 0.0),
        tiers=tuple(tier for tier, is_here in here if is_here),
    )
