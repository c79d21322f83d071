"""What is remembered between requests, and what gives way: the whole package in one page.

A request walks `match` -> `admit` (a lease) -> `capture` and `publish` while it prefills -> `grow` while it decodes ->
`finish` or `abort`. The cache decides and returns `Copy` records; the engine runs them and confirms. `check` proves at
any moment that every unit is free, cached, pinned by a request or in a named copy.

Pure Python: no torch, no asyncio, no input or output; time comes in as an argument. One task owns every object here.
"""

from cache.context import ContextCache
from cache.leases import CaptureTicket, Match, RequestLease
from cache.ledger import check
from cache.pools import Holder, Lease, Pool, PoolCounts, PoolExhaustedError, UnitState
from cache.stats import CacheStats
from cache.types import (
    ROOT_PATH,
    CacheOptions,
    CheckpointKind,
    Copy,
    CopyObject,
    Frontier,
    ReuseReport,
    SkipReason,
    Tier,
    UnitHandle,
)

__all__ = [
    "ROOT_PATH",
    "CacheOptions",
    "CacheStats",
    "CaptureTicket",
    "CheckpointKind",
    "ContextCache",
    "Copy",
    "CopyObject",
    "Frontier",
    "Holder",
    "Lease",
    "Match",
    "Pool",
    "PoolCounts",
    "PoolExhaustedError",
    "RequestLease",
    "ReuseReport",
    "SkipReason",
    "Tier",
    "UnitHandle",
    "UnitState",
    "check",
]
