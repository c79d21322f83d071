"""Who is charged for a step's time, and as what. Pure: it reads the plan, and moves nothing but the clocks."""

from __future__ import annotations

from collections.abc import Iterable

from engine.phases import Phase
from engine.plan import StepPlan
from engine.sequence import SequenceRecord


def charge_step(
    plan: StepPlan,
    alive: Iterable[SequenceRecord],
    resuming: Iterable[SequenceRecord],
    resume_seconds: float,
    now: float,
) -> None:
    """To be called at the end of the step, before anything of it is taken in; `resuming` are those whose first copies,
    within the device, it ran.

    Prompts that share a step share its time by their tokens: to each, the part of the others was a wait.
    """
    computed = {segment.request_id: len(segment.token_ids) for segment in plan.segments}
    prefilling: list[SequenceRecord] = []
    for sequence in alive:
        if sequence.phase is Phase.PREFILL:
            prefilling.append(sequence)
        else:
            sequence.clock.charge(sequence.phase, now)
    for sequence in resuming:
        if sequence.phase is Phase.PREFILL:
            sequence.clock.charge_most(Phase.RESTORE, now, resume_seconds)
    all_tokens = sum(computed.get(sequence.request_id, 0) for sequence in prefilling)
    for sequence in prefilling:
        own_tokens = computed.get(sequence.request_id, 0)
        sequence.clock.charge(Phase.PREFILL, now, own_tokens / all_tokens if all_tokens else 0.0)
        sequence.clock.charge(Phase.STALLED, now)
