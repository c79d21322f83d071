"""The words of the cache: tiers, kinds, paths, reasons, and the records that cross its border."""

from __future__ import annotations

from collections.abc import Iterable
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
    """Why a frontier did not become a checkpoint, or a checkpoint was not copied to host memory."""

    REUSE_OFF = "reuse_off"
    ALREADY_CACHED = "already_cached"
    SLOTS_PINNED = "slots_pinned"
    SLOTS_WORTH_MORE = "slots_worth_more"
    """An anchor, which nobody has used yet, does not drive out what is worth more."""
    HOST_WORTH_MORE = "host_worth_more"
    """What is in host memory is worth more."""
    HOST_PINNED = "host_pinned"
    """What is in host memory is in use, or it is too small."""
    FAULT = "fault"
    """The fire drill `refuse_publish`."""

    @property
    def is_loss(self) -> bool:
        """Whether a later request misses something that was promised to it."""
        return self in (SkipReason.SLOTS_PINNED, SkipReason.SLOTS_WORTH_MORE, SkipReason.FAULT)


class LossReason(StrEnum):
    """Why tokens of a prompt had to be computed (interface: `reuse.lost`)."""

    COLD = "cold"
    """Never seen before."""
    DIVERGED = "diverged"
    """The client rewrote the history of its conversation."""
    EVICTED_STATE = "evicted_state"
    EVICTED_KV = "evicted_kv"
    NO_CHECKPOINT = "no_checkpoint"
    """Computed before, behind the last checkpoint that was wanted there."""
    PUBLISH_SKIPPED = "publish_skipped"
    RESTORE_FAILED = "restore_failed"
    STRUCTURAL = "structural"
    """Below the reuse unit: quicker to compute than to copy back."""
    BYPASS = "bypass"
    """Reuse is off."""


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
    is_turn: bool = True
    """Of a turn closure: whether a turn of a conversation ends there, and not just a raw prompt."""


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
    diverged_at: int | None = None
    """The first token at which a known conversation was rewritten; None where it was not."""
    expected_tokens: int = 0
    """The least that is owed: what a plain cache of the same size, which drops what was used longest ago, would have
    saved, and what was lost through a fault of the cache's own. The rest of the achievable is a matter of memory."""
    fault_tokens: int = 0
    """Of the lost ones those that no want of room took: not kept, dropped or left alone without need."""
    bet_tokens: int = 0
    """Of the lost ones those that gave way to what was worth more, when nothing spoke for a plain cache's choice."""


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """Sizes, in units, and switches. `state_slots` is running requests plus checkpoints; 0 for a model without
    states.
    """

    page_size: int
    kv_pages: int
    state_slots: int
    has_state: bool
    prefix_reuse: bool = True
    host_units: int = 0
    """Units of host memory, one KV page each; 0 is no host tier."""
    host_units_per_state: int = 1
    """Units that a state image takes."""
    host_state_cap: int | None = None
    """Most state images in host memory; None is as many as fit."""
    page_bytes: int = 1
    state_bytes: int = 1
    demote_ahead: int | None = None
    """Checkpoints on the device that are kept ready to be dropped, because host memory has them; None is one for each
    eight that fit, at least two: a request takes two slots, one to run in and one for its turn."""
    ghost_nodes: int | None = None
    """Pages that are known and not kept; None is twice as many as fit in all tiers."""
    self_heal: bool = True
    """Whether an audit gives orphaned units back."""

    def __post_init__(self) -> None:
        if self.page_size < 1:
            raise ValueError(f"page_size must be at least 1, not {self.page_size}")
        if self.has_state and self.state_slots < 1:
            raise ValueError(f"a model with recurrent states needs at least 1 state slot, not {self.state_slots}")
        for name in ("host_units", "host_state_cap", "demote_ahead", "ghost_nodes"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"{name} must be at least 0, not {value}")
        if self.host_units_per_state < 1:
            raise ValueError(f"host_units_per_state must be at least 1, not {self.host_units_per_state}")

    def pages_of(self, tokens: int) -> int:
        """Pages that hold this many tokens."""
        return -(-tokens // self.page_size)

    def bytes_of(self, copies: Iterable[Copy]) -> int:
        """Bytes that these copies move."""
        return sum(self.state_bytes if copy.what is CopyObject.STATE else self.page_bytes for copy in copies)

    @property
    def host_states(self) -> int:
        """Most state images that host memory can hold."""
        if not self.has_state:
            return 0
        fitting = self.host_units // self.host_units_per_state
        return fitting if self.host_state_cap is None else min(fitting, self.host_state_cap)

    @property
    def ready_checkpoints(self) -> int:
        """Checkpoints on the device that are kept ready to be dropped."""
        return max(2, self.state_slots // 8) if self.demote_ahead is None else self.demote_ahead

    @property
    def most_ghost_nodes(self) -> int:
        return 2 * (self.kv_pages + self.host_units) if self.ghost_nodes is None else self.ghost_nodes
