"""Why an answer took as long as it did, in plain words, from what the engine measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from cache import ROOT_PATH, CheckpointKind, LossReason, ReuseReport
from engine.events import RequestEnded
from engine.request import FinishReason, Timings

_WORTH_TELLING_SECONDS = 0.05
_SHARE_WORTH_TELLING = 0.1

_PATHS: Mapping[str, str] = {
    CheckpointKind.SHARED_STABLE_PREFIX: "its tools and system text",
    CheckpointKind.PRIVATE_TURN_CLOSURE: "all up to the last turn of its conversation",
    CheckpointKind.PRIVATE_ENDPOINT: "all up to the end of the answer before it",
    CheckpointKind.PRIVATE_LONG_ANCHOR: "all up to a place within a long prompt",
    CheckpointKind.SHARED_BRANCH: "a beginning that others have too",
}

_LOSSES: Mapping[str, str] = {
    LossReason.COLD: "had never been seen before",
    LossReason.DIVERGED: "followed a place where the client rewrote the conversation",
    LossReason.EVICTED_STATE: "had been computed before, but the state there had given way to others",
    LossReason.EVICTED_KV: "had been computed before, but their KV pages had given way to others",
    LossReason.NO_CHECKPOINT: "had been computed before, behind the last place that was to be kept",
    LossReason.PUBLISH_SKIPPED: "had been computed before, but no checkpoint was kept there",
    LossReason.RESTORE_FAILED: "had been kept, but copying them back failed",
    LossReason.STRUCTURAL: "were quicker to compute than to copy back",
    LossReason.BYPASS: "were computed because reuse is switched off",
}


def explain(ended: RequestEnded) -> list[str]:
    """Sentences, in the order of the answer's life."""
    waits = [*_queue(ended.timings), *_stalled(ended.timings)]
    return [*waits, *_prefill(ended), *_preempted(ended), *_decode(ended), *_end(ended)]


def _queue(timings: Timings) -> Iterator[str]:
    if timings.queue_seconds is None:
        yield f"It waited {in_words(timings.total_seconds or 0.0)} and was never let in."
    elif timings.queue_seconds >= _WORTH_TELLING_SECONDS:
        yield f"It waited {in_words(timings.queue_seconds)} for room before its first step."


def _stalled(timings: Timings) -> Iterator[str]:
    if timings.stalled_seconds is not None and timings.stalled_seconds >= _WORTH_TELLING_SECONDS:
        yield f"For {in_words(timings.stalled_seconds)} it stood behind other prompts, which were computed meanwhile."


def _prefill(ended: RequestEnded) -> Iterator[str]:
    reuse, timings = ended.reuse, ended.timings
    if reuse is None:
        return
    if timings.restore_seconds is not None and timings.restore_seconds >= _WORTH_TELLING_SECONDS:
        yield f"Copying what it reuses took {in_words(timings.restore_seconds)}."
    computed = reuse.prompt_tokens - reuse.cached_tokens
    if reuse.path == ROOT_PATH:
        yield f"Nothing of its {reuse.prompt_tokens:,} prompt tokens was reused."
    else:
        yield f"Of its {reuse.prompt_tokens:,} prompt tokens {reuse.cached_tokens:,} were reused: {_PATHS[reuse.path]}."
    if timings.prefill_seconds is not None and timings.ttft_seconds is not None:
        rate = f", {computed / timings.prefill_seconds:,.0f} a second" if timings.prefill_seconds > 0 else ""
        yield f"Computing the other {computed:,} took {in_words(timings.prefill_seconds)}{rate}."
    yield from _losses(reuse)


def _losses(reuse: ReuseReport) -> Iterator[str]:
    for reason, tokens in sorted(reuse.lost.items(), key=lambda item: -item[1]):
        if tokens >= _SHARE_WORTH_TELLING * reuse.prompt_tokens:
            yield f"{tokens:,} tokens {_LOSSES[reason]}."
    if reuse.diverged_at is not None:
        yield f"The conversation as it was known ends at token {reuse.diverged_at:,}."
    if reuse.fault_tokens:
        yield f"Nothing had needed the room of {reuse.fault_tokens:,} of them: that is the daemon's fault."
    elif reuse.expected_tokens > reuse.cached_tokens:
        missing = reuse.expected_tokens - reuse.cached_tokens
        yield f"A plain cache of the same size would have saved {missing:,} more; /insights tells a fault from a trade."


def _preempted(ended: RequestEnded) -> Iterator[str]:
    """It is always told: whoever wonders at the other figures has to know."""
    usage, seconds = ended.usage, ended.timings.preempted_seconds
    if usage.preemptions and seconds is not None:
        times = {1: "once", 2: "twice"}.get(usage.preemptions, f"{usage.preemptions:,} times")
        yield (
            f"It was set aside {times}, because others needed its room, and lost {in_words(seconds)} by it; "
            f"{usage.recomputed_tokens:,} of its tokens were computed again."
        )


def _decode(ended: RequestEnded) -> Iterator[str]:
    seconds, tokens = ended.timings.decode_seconds, ended.usage.completion_tokens
    if seconds is not None and tokens > 1:
        rate = f", {(tokens - 1) / seconds:,.1f} a second" if seconds > 0 else ""
        yield f"Its {tokens:,} tokens came within {in_words(seconds)}{rate}."


def _end(ended: RequestEnded) -> Iterator[str]:
    if ended.finish_reason is FinishReason.CANCELLED:
        yield "Its client left before the end."
    elif ended.error is not None:
        yield f"It failed: {type(ended.error).__name__}."


def in_words(seconds: float) -> str:
    """`250 ms`, `2.5 s`."""
    return f"{seconds * 1000:,.0f} ms" if seconds < 1 else f"{seconds:,.1f} s"
