"""What an answer says about its cost: tokens, times, and how much of the prompt was reused."""

from __future__ import annotations

from dataclasses import asdict
from typing import Literal

from pydantic import BaseModel, ConfigDict

from cache import ROOT_PATH, ReuseReport
from engine.request import Timings, Usage

ReusePath = Literal[
    "root",
    "private_turn_closure",
    "private_endpoint",
    "private_long_anchor",
    "shared_stable_prefix",
    "shared_branch",
]
LossReason = Literal[
    "cold",
    "diverged",
    "evicted_state",
    "evicted_kv",
    "no_checkpoint",
    "publish_skipped",
    "restore_failed",
    "structural",
    "bypass",
]


class _Cost(BaseModel):
    model_config = ConfigDict(frozen=True)


class PromptTokensDetails(_Cost):
    """OpenAI's breakdown of the prompt."""

    cached_tokens: int


class CompletionTokensDetails(_Cost):
    """OpenAI's breakdown of the answer."""

    reasoning_tokens: int


class UsageBody(_Cost):
    """OpenAI's usage; cached tokens are counted inside the prompt, and those of thinking inside the completion."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class TimingsBody(_Cost):
    """llama.cpp's timings; milliseconds and tokens per second. And where the rest of the time went: all that end in
    `_ms` add up to the time from the submission to the last token."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_second: float
    queue_ms: float
    restore_ms: float
    stalled_ms: float
    preempted_ms: float


class ReuseSource(_Cost):
    """Where the reused tokens lay."""

    device: int
    host: int
    disk: int


class Reuse(_Cost):
    """How much of the prompt was reused, how much could have been, and why the rest was not."""

    path: ReusePath
    prompt_tokens: int
    cached_tokens: int
    achievable_tokens: int
    source: ReuseSource
    lost: dict[LossReason, int]


class Cost(_Cost):
    """The three parts that every answer carries."""

    usage: UsageBody
    timings: TimingsBody
    reuse: Reuse


def cost_of(usage: Usage, timings: Timings | None, reuse: ReuseReport | None) -> Cost:
    """Put together what the engine counted; a request that was never admitted has reused nothing."""
    timings = timings or Timings()
    none = ReuseReport(ROOT_PATH, usage.prompt_tokens, 0, 0, {"device": 0, "host": 0, "disk": 0}, {})
    computed = usage.prompt_tokens - usage.cached_tokens
    prompt_seconds = timings.prefill_seconds or 0.0
    predicted_seconds = timings.decode_seconds or 0.0
    return Cost(
        usage=UsageBody(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            total_tokens=usage.prompt_tokens + usage.completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=usage.cached_tokens),
            completion_tokens_details=CompletionTokensDetails(reasoning_tokens=usage.reasoning_tokens),
        ),
        timings=TimingsBody(
            cache_n=usage.cached_tokens,
            prompt_n=computed,
            prompt_ms=_milliseconds(prompt_seconds),
            prompt_per_second=_rate(computed, prompt_seconds),
            predicted_n=usage.completion_tokens,
            predicted_ms=_milliseconds(predicted_seconds),
            predicted_per_second=_rate(usage.completion_tokens, predicted_seconds),
            queue_ms=_milliseconds(timings.queue_seconds or 0.0),
            restore_ms=_milliseconds(timings.restore_seconds or 0.0),
            stalled_ms=_milliseconds(timings.stalled_seconds or 0.0),
            preempted_ms=_milliseconds(timings.preempted_seconds or 0.0),
        ),
        reuse=Reuse.model_validate(asdict(reuse or none)),
    )


def _milliseconds(seconds: float) -> float:
    return round(seconds * 1000, 3)


def _rate(tokens: int, seconds: float) -> float:
    return round(tokens / seconds, 3) if seconds > 0 else 0.0
