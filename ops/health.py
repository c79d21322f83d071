"""What the daemon says about itself when a probe asks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from cache import Fault
from ops.insights.types import Insight, InsightId, ReuseState, Severity

HEARTBEAT_LIMIT_SECONDS = 20.0
"""An engine loop that has not turned for so long counts as stuck. One step of a large prefill on a busy machine stays
below it: a restart would only make it begin again."""


FAILED_STEPS_LIMIT = 3
"""So many steps that failed in a row, and requests have better places to go to until one works."""


class Phase(StrEnum):
    """Where the daemon is in its life; it moves forward, but for a drain that is undone."""

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"
    """An operator wants no more requests here; can be undone."""
    ENDING = "ending"
    """The process was told to end."""


class HealthStatus(StrEnum):
    """The values of `status`."""

    OK = "ok"
    DEGRADED = "degraded"
    """It answers, but not as it should; a restart is not what helps."""
    STARTING = "starting"
    DRAINING = "draining"
    UNAVAILABLE = "unavailable"


_SERVING = frozenset({HealthStatus.OK, HealthStatus.DEGRADED})
_OF_REUSE = frozenset({InsightId.REUSE_COLLAPSED, InsightId.REUSE_DEGRADED})
_POOR_REUSE = frozenset({ReuseState.DEGRADED, ReuseState.COLLAPSED})


@dataclass(frozen=True, slots=True)
class Health:
    """An answer to a probe; `reasons` is empty when all is well."""

    status: HealthStatus
    reasons: tuple[str, ...] = ()
    reuse: ReuseState = ReuseState.HEALTHY
    faults: tuple[Fault, ...] = ()
    """Of a fire drill, those that are on."""
    is_drained: bool = False
    """Whether an operator drained it, which can be undone; the end of the process, which drains as well, cannot."""

    @property
    def is_ready(self) -> bool:
        """Whether requests should be sent here at all."""
        return self.status in _SERVING

    @property
    def reuses(self) -> bool:
        """Whether prompts are reused as they should be: what a balancer asks that has better places to send them."""
        return self.reuse not in _POOR_REUSE


def judge_health(
    phase: Phase,
    heartbeat_age_seconds: float | None,
    reuse: ReuseState,
    insights: Iterable[Insight],
    faults: Iterable[Fault] = (),
    failed_steps: int = 0,
) -> Health:
    """`heartbeat_age_seconds` is the time since the engine loop last turned; None when there is no running engine.
    `faults` are those of a fire drill that are on: they are told, and change nothing else here. `failed_steps` have
    failed since one last worked."""
    if phase is Phase.STARTING:
        return Health(HealthStatus.STARTING, ("the model is being loaded",), reuse)
    if phase is Phase.DRAINING:
        drained = "an operator drained the daemon; POST /admin/undrain lets it take requests again"
        return Health(HealthStatus.DRAINING, (drained,), reuse, is_drained=True)
    if phase is Phase.ENDING:
        return Health(HealthStatus.DRAINING, ("the daemon is shutting down",), reuse)
    if heartbeat_age_seconds is None:
        return Health(HealthStatus.UNAVAILABLE, ("the engine loop has stopped",), reuse)
    if heartbeat_age_seconds > HEARTBEAT_LIMIT_SECONDS:
        late = f"the engine loop has not turned for {heartbeat_age_seconds:.0f} seconds"
        return Health(HealthStatus.UNAVAILABLE, (late,), reuse)
    if failed_steps >= FAILED_STEPS_LIMIT:
        failed = f"{failed_steps} steps of the engine failed, and none has worked since"
        return Health(HealthStatus.UNAVAILABLE, (failed,), reuse, tuple(sorted(faults)))
    reasons = tuple(
        f"{each.id}: {each.title}" for each in insights if each.severity is Severity.CRITICAL or each.id in _OF_REUSE
    )
    if reuse in _POOR_REUSE and not reasons:
        reasons = (f"reuse of prompts is {reuse}",)
    status = HealthStatus.DEGRADED if reasons else HealthStatus.OK
    return Health(status, reasons, reuse, tuple(sorted(faults)))
