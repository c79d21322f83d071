"""What an operator asks under `/admin`, and what is answered."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import Field

from server.schema.base import AnswerModel, AtMost, RequestModel
from server.schema.errors import ErrorDetail

TierName = Literal["device", "host", "disk"]
FaultName = Literal["leak_host_state", "refuse_publish", "drop_state", "restore_fail", "step_fail", "slow_step"]


_MAX_NAMES = 64

# Checked by the route, whose error names what was given.
_AnyTier = Annotated[str, Field(json_schema_extra={"enum": list(get_args(TierName))})]
_AnyFault = Annotated[str, Field(json_schema_extra={"enum": list(get_args(FaultName))})]


class PoolUnits(AnswerModel):
    """Units of a pool by state; they add up to the capacity."""

    capacity: int
    free: int
    cached: int
    pinned: int
    in_flight: int


class TreeSizes(AnswerModel):
    """`nodes`: pages that are known, kept or not; `ghosts`: those of which only the tokens are left; `depth_tokens`: of
    the deepest frontier that can be resumed."""

    nodes: int
    ghosts: int
    checkpoints: int
    depth_tokens: int


class Conversation(AnswerModel):
    """A conversation or a shared prefix, by the checkpoint from which it would go on; the id means nothing outside."""

    id: str
    kind: Literal[
        "private_turn_closure", "private_endpoint", "private_long_anchor", "shared_stable_prefix", "shared_branch"
    ]
    tokens: int
    turns: int
    uses: int
    idle_seconds: float
    tiers: list[TierName]


class KernelShown(AnswerModel):
    """What serves a kernel, and why where it is not the first choice (else empty)."""

    kernel: str
    implementation: str
    reason: str


class CacheAnswer(AnswerModel):
    """The cache at this moment. From `selections` to `orphans_reclaimed` everything counts from the start, what was
    admitted and then left by its client included; `evictions` by pool and kind of checkpoint."""

    pools: dict[str, PoolUnits]
    requests_running: int
    requests_waiting: int
    selections: dict[str, int]
    reused_tokens: dict[TierName, int]
    computed_tokens: int
    achievable_tokens: int
    expected_tokens: Annotated[
        int, Field(description="what a sound cache of the same size would have reused; less than that is a fault")
    ]
    lost_tokens: dict[str, int]
    published: dict[str, int]
    evictions: dict[str, dict[str, int]]
    publish_skipped: dict[str, int]
    checkpoints_dropped: int
    checkpoints_demoted: int
    restores: int
    restore_failures: int
    quarantined: int
    audits: int
    violations: int
    orphans_reclaimed: dict[str, int]
    faults: list[FaultName]
    oldest_entry_seconds: Annotated[
        dict[str, float], Field(description="since the entry was used that was used longest ago, by pool")
    ]
    tree: TreeSizes
    conversations: Annotated[list[Conversation], Field(description="those with the most tokens")]
    kernels: Annotated[list[KernelShown], Field(description="what the model is computed with, since the start")]


class ResetRequest(RequestModel):
    """Which tiers to empty."""

    tiers: Annotated[list[_AnyTier], Field(min_length=1), AtMost(_MAX_NAMES)]


class TierResetAnswer(AnswerModel):
    """What was dropped, and the units that are free again, by pool; `pinned_checkpoints` had to stay, because requests
    or copies use them."""

    checkpoints: int
    units: dict[str, int]
    pinned_checkpoints: int


class ResetAnswer(AnswerModel):
    """Per tier."""

    tiers: dict[TierName, TierResetAnswer]


class ResetConflict(ResetAnswer):
    """What could be dropped was dropped; the error says what could not."""

    error: ErrorDetail


class AuditAnswer(AnswerModel):
    """`violations`: as they were found, one line each; empty when every unit is accounted for. `reclaimed`: units that
    nobody held and that are free again, by pool. `remaining`: violations that are still there."""

    violations: list[str]
    reclaimed: dict[str, int]
    remaining: list[str]


class FaultsRequest(RequestModel):
    """The faults of the fire drill to switch on; all others are switched off."""

    faults: Annotated[list[_AnyFault], AtMost(_MAX_NAMES)]


class FaultsAnswer(AnswerModel):
    """The faults that are switched on."""

    faults: list[FaultName]


class DrainAnswer(AnswerModel):
    """What is still to be finished at this moment."""

    requests_running: int
    requests_waiting: int
