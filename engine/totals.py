"""What the loop has done since the start, and how long its steps took."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from engine.distribution import LATENCY_BOUNDS_SECONDS, OVERHEAD_BOUNDS_SECONDS, Distribution, DistributionView
from engine.plan import StepPlan, StepResult


class StepKind(StrEnum):
    """What a step computes."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"
    COPY = "copy"
    """Nothing; it only moves bytes between the device and host memory."""


@dataclass(slots=True)
class LoopTotals:
    """Counts since the start. Mutable: only the loop's task may touch it."""

    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    suspensions: int = 0
    """Of schedulers that are no more; and so are the next."""
    recomputed_tokens: int = 0
    step_failures: int = 0
    restarts: int = 0
    _step_seconds: dict[StepKind, Distribution] = field(
        default_factory=lambda: {kind: Distribution(LATENCY_BOUNDS_SECONDS) for kind in StepKind}
    )
    _overhead_seconds: Distribution = field(default_factory=lambda: Distribution(OVERHEAD_BOUNDS_SECONDS))

    def count_step(self, plan: StepPlan, result: StepResult, seconds: float) -> int:
        """Add a step that took `seconds` in the engine's thread; returns how many prompt tokens it computed."""
        decodes = sum(segment.is_decode for segment in plan.segments)
        kind = StepKind.MIXED if decodes else StepKind.PREFILL
        kind = StepKind.DECODE if decodes == plan.num_tokens else kind
        kind = kind if plan.segments else StepKind.COPY
        self._step_seconds[kind].observe(seconds)
        self.steps += 1
        self.decode_tokens += decodes
        prefilled = plan.num_tokens - decodes
        self.prefill_tokens += prefilled
        return prefilled

    def count_turn(self, result: StepResult, seconds: float) -> None:
        """Add the turn of the loop that the step was a part of, from its plan to its last token handed out."""
        at_work = result.compute_seconds + result.resume_seconds + result.copy_seconds
        self._overhead_seconds.observe(max(seconds - at_work, 0.0))

    @property
    def step_seconds(self) -> Mapping[StepKind, DistributionView]:
        return {kind: seconds.view() for kind, seconds in self._step_seconds.items()}

    @property
    def overhead_seconds(self) -> DistributionView:
        return self._overhead_seconds.view()
