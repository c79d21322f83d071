"""What happens in the engine, as it happens; whoever observes it may not touch the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cache import AuditReport, ReuseReport, Tier
from engine.errors import RequestError
from engine.request import FinishReason, Timings, Usage


@dataclass(frozen=True, slots=True)
class ReuseDecided:
    """A request was let in for the first time, and what it reuses is on the device."""

    request_id: str
    namespace: str
    """May hold a client's salt: never to be shown."""
    reuse: ReuseReport


@dataclass(frozen=True, slots=True)
class RequestEnded:
    """The one end of each request that was submitted, whatever the exit."""

    request_id: str
    finish_reason: FinishReason
    """CANCELLED where its consumer has left, ERROR where it failed."""
    usage: Usage
    """Of one that was never let in: its prompt, and nothing else."""
    timings: Timings
    """Phases that were not reached are absent."""
    reuse: ReuseReport | None
    """None for one that was never let in."""
    error: RequestError | None = None
    """Why it failed; None for every other exit."""


@dataclass(frozen=True, slots=True)
class AuditDone:
    """The books were compared from scratch."""

    report: AuditReport
    seconds: float


@dataclass(frozen=True, slots=True)
class CacheReset:
    """An operator emptied these tiers."""

    tiers: tuple[Tier, ...]


@dataclass(frozen=True, slots=True)
class StepFailed:
    """A step raised and its requests failed with it, or had no finite logits for some, which failed alone."""

    cause: str
    """The name of the exception's type."""
    requests: int
    consecutive: int
    """Steps that raised in a row, this one included if it did."""


@dataclass(frozen=True, slots=True)
class LoopRestarted:
    """The loop began anew with fresh pools: everything that was remembered is gone."""

    cause: str


EngineEvent = ReuseDecided | RequestEnded | AuditDone | CacheReset | StepFailed | LoopRestarted
Observer = Callable[[EngineEvent], None]
"""Called in the engine loop's task: it must be quick. What it raises is logged, and harms nobody."""
