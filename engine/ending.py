"""How a request ended, as its consumer and as an observer are told."""

from __future__ import annotations

from dataclasses import replace

from engine.errors import RequestError
from engine.events import RequestEnded
from engine.phases import Phase
from engine.request import Delta, FinishReason, GenerationRequest, Timings, Usage
from engine.sequence import SequenceRecord
from engine.text.answer import AnswerText


def last_delta(answer: AnswerText, sequence: SequenceRecord, reason: FinishReason) -> Delta:
    """The end of an answer's stream: the text that was held back, and what it cost."""
    rest = answer.flush()
    usage = replace(_usage(sequence), reasoning_tokens=answer.reasoning_tokens)
    timings, reuse = _timings(sequence), sequence.reuse
    return Delta(rest.text, (), reason, usage, timings, reuse, rest.logprobs, rest.reasoning)


def finished(sequence: SequenceRecord, reason: FinishReason) -> RequestEnded:
    """The model, or a limit of the request, ended it."""
    return RequestEnded(sequence.request_id, reason, _usage(sequence), _timings(sequence), sequence.reuse)


def broken_off(
    request: GenerationRequest,
    submitted_at: float,
    sequence: SequenceRecord | None,
    error: RequestError | None,
    now: float,
) -> RequestEnded:
    """It failed with `error`, or without one its consumer has left; `sequence` is None where it was still on its way to
    the scheduler."""
    reason = FinishReason.CANCELLED if error is None else FinishReason.ERROR
    if sequence is None:
        usage, timings = Usage(len(request.prompt_token_ids), 0), Timings(total_seconds=now - submitted_at)
        return RequestEnded(request.request_id, reason, usage, timings, None, error)
    return RequestEnded(request.request_id, reason, _usage(sequence), _timings(sequence), sequence.reuse, error)


def _usage(sequence: SequenceRecord) -> Usage:
    return Usage(
        prompt_tokens=len(sequence.request.prompt_token_ids),
        completion_tokens=sequence.output_tokens,
        cached_tokens=0 if sequence.reuse is None else sequence.reuse.cached_tokens,
        preemptions=sequence.preemptions,
        recomputed_tokens=sequence.recomputed_tokens,
    )


def _timings(sequence: SequenceRecord) -> Timings:
    """Of one that has ended."""
    submitted, first, seconds = sequence.submitted_at, sequence.first_token_at, sequence.clock.seconds
    total_seconds = sum(seconds.values())
    if sequence.admitted_at is None:
        return Timings(total_seconds=total_seconds)
    return Timings(
        queue_seconds=seconds[Phase.QUEUE],
        restore_seconds=seconds[Phase.RESTORE],
        prefill_seconds=seconds[Phase.PREFILL],
        ttft_seconds=None if first is None else first - submitted,
        decode_seconds=None if first is None else seconds[Phase.DECODE],
        total_seconds=total_seconds,
        stalled_seconds=seconds[Phase.STALLED],
        preempted_seconds=seconds[Phase.PREEMPTED],
    )
