"""One step's work: the only thing that the scheduler hands to the runner, and what the runner hands back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from cache import Copy
from engine.request import SamplingParams, TokenLogprob

if TYPE_CHECKING:
    from engine.logits import LogitEdits


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Consecutive tokens of one request that a step computes."""

    request_id: str
    token_ids: tuple[int, ...]
    start: int
    """Position of the first of `token_ids` in its sequence; the tokens before it are in the pages and the state."""
    page_ids: npt.NDArray[np.int32]
    """The block table: pages of positions 0..end - 1, in order. Read only."""
    state_slot: int
    is_sampled: bool
    """Whether a token is to be picked after the last one."""
    sampling: SamplingParams
    """Its seed is set."""
    edits: LogitEdits | None = None
    """What is done to its logits before a token is picked."""
    capture_slot: int | None = None
    """Where the state after the last token is to be copied to, besides `state_slot`."""

    @property
    def end(self) -> int:
        """Position after the last token: the position of the token that is picked."""
        return self.start + len(self.token_ids)

    @property
    def is_decode(self) -> bool:
        """One new token with a context: the kernels want these first."""
        return len(self.token_ids) == 1 and self.start > 0


@dataclass(frozen=True, slots=True, eq=False)
class CopyBatch:
    """Copies of one restore or demotion that a step runs beside its segments; nothing else reads or writes there."""

    number: int
    copies: tuple[Copy, ...]


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """Segments, decodes first, at most one of each request; or copies alone, and then all of them are waited for."""

    segments: tuple[Segment, ...]
    resumes: tuple[Copy, ...] = ()
    """Within the device; to be run before anything else: a segment may write where a copy reads."""
    background: tuple[CopyBatch, ...] = ()
    """Between the device and host memory; one that fails fails alone."""
    under_way: frozenset[int] = frozenset()
    """Batches of former steps that are still waited for. One that is not in it and not done was given up: what it reads
    and writes may be somebody else's by now, so it has to be over before anything is written."""

    @property
    def num_tokens(self) -> int:
        return sum(len(segment.token_ids) for segment in self.segments)


@dataclass(frozen=True, slots=True)
class CopyOutcome:
    """How a batch went: all of it, or nothing that can be relied upon."""

    seconds: float
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step picked: a token for each sampled segment but those that are not finite, by request id."""

    token_ids: Mapping[str, int]
    logprobs: Mapping[str, TokenLogprob] = field(default_factory=dict)
    """Of the requests that asked for them."""
    not_finite: frozenset[str] = frozenset()
    """Requests whose row of logits holds no number to pick a token by: their states cannot be trusted."""
    resume_seconds: float = 0.0
    compute_seconds: float = 0.0
    """Of the segments alone."""
    copy_seconds: float = 0.0
    """That went by for copies to and from host memory alone; less than they took, where they run beside the step."""
    copied: Mapping[int, CopyOutcome] = field(default_factory=dict)
    """By the numbers of the batches."""
    under_way: frozenset[int] = frozenset()
    """Batches that were begun and are not done yet: a later step tells of them."""
