"""What the daemon says about itself when a probe asks."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

HEARTBEAT_LIMIT_SECONDS = 20.0
"""An engine loop that has not turned for so long counts as stuck. One step of a large prefill on a busy machine stays
below it: a restart would only make it begin again."""


class Phase(StrEnum):
    """Where the daemon is in its life; it only ever moves forward."""

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"


class HealthStatus(StrEnum):
    """The values of `status`; all but OK answer 503."""

    OK = "ok"
    STARTING = "starting"
    DRAINING = "draining"
    UNAVAILABLE = "unavailable"


@dataclass(frozen=True, slots=True)
class Health:
    """An answer to a probe; `reasons` is empty when all is well."""

    status: HealthStatus
    reasons: tuple[str, ...] = ()

    @property
    def is_ready(self) -> bool:
        return self.status is HealthStatus.OK


def judge_health(phase: Phase, heartbeat_age_seconds: float | None) -> Health:
    """`heartbeat_age_seconds` is the time since the engine loop last turned; None when there is no running engine."""
    if phase is Phase.STARTING:
        return Health(HealthStatus.STARTING, ("the model is being loaded",))
    if phase is Phase.DRAINING:
        return Health(HealthStatus.DRAINING, ("the daemon is shutting down",))
    if heartbeat_age_seconds is None:
        return Health(HealthStatus.UNAVAILABLE, ("the engine loop has stopped",))
    if heartbeat_age_seconds > HEARTBEAT_LIMIT_SECONDS:
        return Health(
            HealthStatus.UNAVAILABLE, (f"the engine loop has not turned for {heartbeat_age_seconds:.0f} seconds",)
        )
    return Health(HealthStatus.OK)
