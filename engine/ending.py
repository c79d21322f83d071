"""How a request ended, as its consumer and as an observer are told."""

from __future__ import annotations

from dataclasses import replace

from engine.errors import RequestError
from engine.events import RequestEnded
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
    usage, timings, reuse = Usage(len(request.prompt_token_ids), 0), Timings(), None
    if sequence is not None:
        usage, timings, reuse = _usage(sequence), _timings(sequence), sequence.reuse
    timings = replace(timings, total_seconds=now - submitted_at)
    return RequestEnded(request.request_id, reason, usage, timings, reuse, error)


def _usage(sequence: SequenceRecord) -> Usage:
    cached_tokens = 0 if sequence.reuse is None else sequence.reuse.cached_tokens
    return Usage(len(sequence.request.prompt_token_ids), sequence.output_tokens, cached_tokens)


def _timings(sequence: SequenceRecord) -> Timings:
    submitted, admitted = sequence.submitted_at, sequence.admitted_at
    first, last = sequence.first_token_at, sequence.last_token_at
    return Timings(
        queue_seconds=None if admitted is None else admitted - submitted,
        restore_seconds=None if admitted is None else sequence.restore_seconds,
        prefill_seconds=None if admitted is None or first is None else first - admitted,
        ttft_seconds=None if first is None else first - submitted,
        decode_seconds=None if first is None or last is None else last - first,
        total_seconds=None if last is None else last - submitted,
    )
