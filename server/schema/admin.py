"""What an operator asks under `/admin`, and what is answered."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import Field

from server.schema.base import AnswerModel, RequestModel
from server.schema.errors import ErrorDetail
from server.schema.usage import LossReason, ReusePath, ReuseSource

TierName = Literal["device", "host", "disk"]
FaultName = Literal["leak_host_state", "refuse_publish", "drop_state", "restore_fail", "step_fail", "slow_step"]


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


class ResetRequest(RequestModel):
    """Which tiers to empty."""

    tiers: Annotated[list[_AnyTier], Field(min_length=1)]


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

    faults: list[_AnyFault]


class FaultsAnswer(AnswerModel):
    """The faults that are switched on."""

    faults: list[FaultName]


class AnswerTimings(AnswerModel):
    """Seconds; a phase that was not reached is null."""

    queue: float | None
    restore: float | None
    prefill: float | None
    ttft: float | None
    decode: float | None
    total: float | None


class AnswerResult(AnswerModel):
    """What one answer cost; `reuse` is the path."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    computed_prefill_tokens: int
    achievable_tokens: int
    reuse: ReusePath
    source: ReuseSource
    lost: dict[LossReason, int]
    diverged_at: Annotated[
        int | None, Field(description="tokens that the prompt shares with one that was seen before and goes on")
    ]


class AnswerRecordBody(AnswerModel):
    """One answer; result and timings are null until it has ended by itself."""

    id: str
    finish_reason: Literal["stop", "length", "cancelled", "error"] | None
    result: AnswerResult | None
    timings_seconds: AnswerTimings | None


class RequestRecordBody(AnswerModel):
    """One request and its answers; `outcome` is null while it runs."""

    request_id: str
    endpoint: str
    started_unix_ms: int
    outcome: Literal["ok", "bad_request", "overloaded", "cancelled", "error"] | None
    answers: list[AnswerRecordBody]
