"""What is remembered between requests, and what gives way: the whole package in one page.

A request walks `match` -> `admit` (a lease) -> `capture` and `publish` while it prefills -> `grow` while it decodes ->
`finish` or `abort`. The cache decides and returns `Copy` records; the engine runs them and confirms. `check` proves at
any moment that every unit is free, cached, pinned by a request or in a named copy.

Pure Python: no torch, no asyncio, no input or output; time comes in as an argument. One task owns every object here.
"""

from cache.census import Census, Resident, oldest_entry_seconds, take_census
from cache.context import ContextCache
from cache.costs import Costs
from cache.counts import host_state_counts
from cache.demotion import Demotion
from cache.faults import Fault, Faults
from cache.leases import CaptureTicket, Match, RequestLease
from cache.ledger import AuditReport, audit, check, heal
from cache.matching import Known
from cache.pools import Holder, Lease, Pool, PoolCounts, PoolExhaustedError, UnitState
from cache.stats import CacheStats
from cache.tree import shared_tokens
from cache.types import (
    ROOT_PATH,
    CacheOptions,
    CheckpointKind,
    Copy,
    CopyObject,
    Frontier,
    LossReason,
    ReuseReport,
    SkipReason,
    Tier,
    UnitHandle,
)
from cache.upkeep import ResetCounts

__all__ = [
    "ROOT_PATH",
    "AuditReport",
    "CacheOptions",
    "CacheStats",
    "CaptureTicket",
    "Census",
    "CheckpointKind",
    "ContextCache",
    "Copy",
    "CopyObject",
    "Costs",
    "Demotion",
    "Fault",
    "Faults",
    "Frontier",
    "Holder",
    "Known",
    "Lease",
    "LossReason",
    "Match",
    "Pool",
    "PoolCounts",
    "PoolExhaustedError",
    "RequestLease",
    "ResetCounts",
    "Resident",
    "ReuseReport",
    "SkipReason",
    "Tier",
    "UnitHandle",
    "UnitState",
    "audit",
    "check",
    "heal",
    "host_state_counts",
    "oldest_entry_seconds",
    "shared_tokens",
    "take_census",
]
