"""`/admin/requests`, `/admin/history`, `/admin/server`: what the last requests cost, the last hour, and who serves."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from server.schema.base import AnswerModel
from server.schema.usage import LossReason, ReusePath, ReuseSource


class AnswerTimings(AnswerModel):
    """Seconds; a phase that was not reached is null. All but `ttft` and `total` add up to `total`."""

    queue: float | None
    restore: float | None
    prefill: float | None
    ttft: float | None
    decode: float | None
    total: float | None
    stalled: Annotated[float | None, Field(description="let in, but others' prompts were computed")]
    preempted: Annotated[float | None, Field(description="set aside for others, until it was where it had been")]


class AnswerResult(AnswerModel):
    """What one answer cost; `reuse` is the path."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    computed_prefill_tokens: Annotated[int | None, Field(description="null where the prefill did not come to its end")]
    achievable_tokens: int
    expected_tokens: Annotated[
        int, Field(description="what a sound cache of the same size would have reused; less than that is a fault")
    ]
    reuse: ReusePath
    source: ReuseSource
    lost: dict[LossReason, int]
    diverged_at: Annotated[
        int | None, Field(description="tokens that the prompt shares with one that was seen before and goes on")
    ]
    preemptions: Annotated[int, Field(description="how often it was set aside, because others needed its room")]
    recomputed_tokens: Annotated[int, Field(description="computed a second time because of that")]


class AnswerFailure(AnswerModel):
    """Why an answer failed."""

    code: str | None
    type: str


class AnswerRecordBody(AnswerModel):
    """One answer; all but the id is null until it has ended, and the result of one that was never let in."""

    id: str
    finish_reason: Literal["stop", "length", "cancelled", "error"] | None
    result: AnswerResult | None
    timings_seconds: AnswerTimings | None
    error: AnswerFailure | None
    explanation: Annotated[list[str], Field(description="why it took as long as it did, in plain words")]


class RequestRecordBody(AnswerModel):
    """One request and its answers; `outcome` is null while it runs."""

    request_id: str
    endpoint: str
    started_unix_ms: int
    outcome: Literal["ok", "bad_request", "overloaded", "cancelled", "error"] | None
    answers: list[AnswerRecordBody]


class RequestsAnswer(AnswerModel):
    """Newest first, those that run included."""

    requests: list[RequestRecordBody]


class HistoryAnswer(AnswerModel):
    """The last throughput events, oldest first: each with the time of its end, and the fields that docs/events
    describes."""

    generated_unix_ms: int
    interval_seconds: float
    points: list[dict[str, Any]]


class ServerAnswer(AnswerModel):
    """What is served, by what, and for how long the daemon has been there."""

    version: str
    model: str
    architecture: str
    backend: str
    max_context_tokens: int
    max_concurrency: int
    uptime_seconds: float
