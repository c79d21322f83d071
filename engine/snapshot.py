"""What the engine says about itself, for health, metrics and the dashboard."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from cache import AuditReport, CacheStats, CopyObject, Fault, PoolCounts
from engine.copies import Direction, Transfer
from engine.distribution import DistributionView
from engine.totals import StepKind


class EngineStatus(StrEnum):
    """Where the engine is in its life."""

    STARTING = "starting"
    RUNNING = "running"
    DRAINING = "draining"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """Counts at one moment, taken between two steps or during one; totals count from the start of the engine."""

    status: EngineStatus
    heartbeat_age_seconds: float
    """Since the loop last turned; a loop that is well turns at least once a second, unless one step takes longer."""
    running: int
    """Requests that hold pages and a slot: `restoring + prefilling + decoding`."""
    waiting: int
    """Requests that wait for room, suspended ones included."""
    restoring: int
    prefilling: int
    decoding: int
    kv_pages: PoolCounts
    state_slots: PoolCounts
    host_units: PoolCounts
    host_state_slots: PoolCounts
    """State images against the most that host memory can hold."""
    cache: CacheStats
    """A copy."""
    transfers: Mapping[tuple[Direction, CopyObject], Transfer]
    """A copy."""
    restore_bytes_per_second: float | None
    """Measured over the last minutes; None before the first restore."""
    prefill_tokens_per_second: float | None
    last_audit: AuditReport | None
    """None before the first."""
    steps_total: int
    prefill_tokens_total: int
    decode_tokens_total: int
    suspensions_total: int
    """Times that a request was set aside while it ran, because others needed its room."""
    recomputed_tokens_total: int
    """Computed a second time because of that; `prefill_tokens_total` has them as well."""
    step_failures_total: int
    consecutive_step_failures: int
    loop_restarts_total: int
    step_seconds: Mapping[StepKind, DistributionView]
    step_overhead_seconds: DistributionView
    """Of the turns of the loop, what was neither computing nor copying."""
    oldest_entry_seconds: Mapping[str, float]
    """How long ago the entry was used that was used longest ago, by pool; 0 for a pool without one. Counted every few
    seconds."""
    faults: frozenset[Fault] = frozenset()
    """Of a fire drill, those that are on."""

    @property
    def pools(self) -> dict[str, PoolCounts]:
        """Every pool, by the name that operators know it by."""
        return {
            "device_kv_pages": self.kv_pages,
            "device_state_slots": self.state_slots,
            "host_units": self.host_units,
            "host_state_slots": self.host_state_slots,
        }
