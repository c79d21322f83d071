"""The words of the cache: tiers, kinds, paths, reasons, and the records that cross its border."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Tier(StrEnum):
    """Where bytes are kept. Host and disk replicas come with their own pools; every record already names its tier."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


class CheckpointKind(StrEnum):
    """Why a frontier became a checkpoint (design, section 3)."""

    SHARED_STABLE_PREFIX = "shared_stable_prefix"
    PRIVATE_TURN_CLOSURE = "private_turn_closure"
    PRIVATE_ENDPOINT = "private_endpoint"
    PRIVATE_LONG_ANCHOR = "private_long_anchor"
    SHARED_BRANCH = "shared_branch"

    @property
    def is_shared(self) -> bool:
        return self in (CheckpointKind.SHARED_STABLE_PREFIX, CheckpointKind.SHARED_BRANCH)


ROOT_PATH = "root"
"""The reuse path of a request that found no checkpoint; every other path is a CheckpointKind."""


class SkipReason(StrEnum):
    """Why a frontier did not become a checkpoint."""

    REUSE_OFF = "reuse_off"
    ALREADY_CACHED = "already_cached"
    SLOTS_PINNED = "slots_pinned"
    SLOTS_WORTH_MORE = "slots_worth_more"
    """An anchor, which nobody has used yet, does not drive out what is worth more."""


class CopyObject(StrEnum):
    """What a copy moves: one KV page over all layers, or one state image."""

    KV_PAGE = "kv_page"
    STATE = "state"


@dataclass(frozen=True, slots=True)
class UnitHandle:
    """What one lease holds in one pool, as the engine addresses it: one unit, or, for a state image in host memory,
    several that need not be adjacent, in the order of the image's bytes. Valid while the lease is open."""

    tier: Tier
    units: tuple[int, ...]

    @property
    def unit(self) -> int:
        """The only one. Raises ValueError when there are several, or none."""
        if len(self.units) != 1:
            raise ValueError(f"one unit was expected, this handle has {len(self.units)}; use `units`")
        return self.units[0]


@dataclass(frozen=True, slots=True)
class Copy:
    """Bytes for the engine to move; the cache decides, the engine copies, then confirms."""

    what: CopyObject
    source: UnitHandle
    destination: UnitHandle


@dataclass(frozen=True, slots=True)
class Frontier:
    """A place in a prompt, in tokens from its start, where a checkpoint is wanted, and why."""

    tokens: int
    kind: CheckpointKind


@dataclass(frozen=True, slots=True)
class ReuseReport:
    """What one request reused, as the API's `reuse` object tells it.

    The lost tokens add up to what lies between the reused ones and the last frontier that the request itself leaves
    behind: what follows that one (the generation prompt) is computed every time.
    """

    path: str
    prompt_tokens: int
    cached_tokens: int
    achievable_tokens: int
    source: dict[str, int]
    lost: dict[str, int]


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """Sizes, in units, and switches. `state_slots` is running requests plus checkpoints; 0 for a model without
    states."""

    page_size: int
    kv_pages: int
    state_slots: int
    has_state: bool
    prefix_reuse: bool = True

    def __post_init__(self) -> None:
        if self.page_size < 1:
            raise ValueError(f"page_size must be at least 1, not {self.page_size}")
        if self.has_state and self.state_slots < 1:
            raise ValueError(f"a model with recurrent states needs at least 1 state slot, not {self.state_slots}")

    def pages_of(self, tokens: int) -> int:
        """Pages that hold this many tokens."""
        return -(-tokens // self.page_size)
