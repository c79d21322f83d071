"""From what the engine tells to the events that an operator reads."""

from __future__ import annotations

from engine.events import AuditDone, RequestEnded
from engine.request import FinishReason
from ops.events import Audit, RequestDone, RequestError, Result, TimingsSeconds

_UNNAMED = "internal_error"


def terminal_event(ended: RequestEnded, request_id: str, endpoint: str) -> RequestDone | RequestError:
    """The one end of an answer. The engine knows it by the answer's id; `request_id` is the `x-request-id`."""
    result, timings = result_of(ended), _timings(ended)
    if ended.finish_reason is not FinishReason.ERROR:
        return RequestDone(request_id, ended.request_id, endpoint, result, timings)
    code = getattr(ended.error, "code", None) or _UNNAMED
    error_type = type(ended.error).__name__ if ended.error is not None else _UNNAMED
    return RequestError(request_id, ended.request_id, endpoint, code, error_type, result, timings)


def audit_event(done: AuditDone) -> Audit:
    report = done.report
    return Audit(
        violations=len(report.violations),
        reclaimed={pool: units for pool, units in report.reclaimed.items() if units},
        remaining=len(report.remaining),
        audit_seconds=done.seconds,
    )


def result_of(ended: RequestEnded) -> Result:
    """What the answer came to; without reuse where it was never let in."""
    usage, reuse = ended.usage, ended.reuse
    finish_reason = ended.finish_reason.value
    if reuse is None:
        return Result(finish_reason, usage.prompt_tokens, usage.completion_tokens)
    is_prefilled = ended.timings.ttft_seconds is not None
    return Result(
        finish_reason=finish_reason,
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=reuse.cached_tokens,
        computed_prefill_tokens=usage.prompt_tokens - reuse.cached_tokens if is_prefilled else None,
        achievable_tokens=reuse.achievable_tokens,
        expected_tokens=reuse.expected_tokens,
        reuse=reuse.path,
        source=dict(reuse.source),
        lost={reason: tokens for reason, tokens in reuse.lost.items() if tokens},
        diverged_at=reuse.diverged_at,
        preemptions=usage.preemptions,
        recomputed_tokens=usage.recomputed_tokens,
    )


def _timings(ended: RequestEnded) -> TimingsSeconds:
    timings = ended.timings
    return TimingsSeconds(
        queue=timings.queue_seconds,
        restore=timings.restore_seconds,
        prefill=timings.prefill_seconds,
        ttft=timings.ttft_seconds,
        decode=timings.decode_seconds,
        total=timings.total_seconds,
        stalled=timings.stalled_seconds,
        preempted=timings.preempted_seconds,
    )
