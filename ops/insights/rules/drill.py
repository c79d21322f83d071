"""A fire drill that is on: said for as long as it lasts, so that nobody mends what is broken on purpose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from cache import Fault
from engine.snapshot import EngineSnapshot
from ops.insights.rules.base import Rule, admin
from ops.insights.types import Finding, InsightId, Severity

_EFFECTS: Mapping[Fault, str] = {
    Fault.LEAK_HOST_STATE: "state images that leave host memory are not given back",
    Fault.REFUSE_PUBLISH: "nothing that is computed is kept",
    Fault.DROP_STATE: "states are lost as soon as they are kept",
    Fault.RESTORE_FAIL: "copies from host memory fail",
    Fault.STEP_FAIL: "steps of the model fail",
    Fault.SLOW_STEP: "each step takes a fifth of a second longer",
}

_DRILLED = frozenset(
    {
        InsightId.REUSE_COLLAPSED,
        InsightId.REUSE_DEGRADED,
        InsightId.POOL_PINNED,
        InsightId.LEDGER_VIOLATION,
        InsightId.TIER_INERT,
        InsightId.EVICTION_CLIFF,
        InsightId.QUEUE_SATURATED,
        InsightId.QUEUED_BEHIND_CONCURRENCY,
        InsightId.PREFILL_DOMINATED,
        InsightId.ENGINE_FAULTS,
    }
)
"""Insights that a fault of a drill can be the cause of."""


class FireDrill(Rule):
    """Open while a fault is on."""

    id = InsightId.FIRE_DRILL

    def judge(self, snapshot: EngineSnapshot, now: float, *, is_open: bool) -> Finding | None:
        faults = sorted(snapshot.faults)
        if not faults:
            return None
        effects = "; ".join(f"{fault}: {_EFFECTS[fault]}" for fault in faults)
        return Finding(
            severity=Severity.WARNING,
            title="A fire drill is on",
            statement=f"This daemon fails on purpose ({effects}). What else is wrong may be the drill's doing.",
            evidence={"faults": ", ".join(faults)},
            measured_over={},
            recommendation=f"When the drill is over, end it: {_end()}",
        )


def while_drilled(found: Mapping[InsightId, Finding], faults: frozenset[Fault]) -> dict[InsightId, Finding]:
    """The same findings, where those that the drill may have caused advise to end it, and nothing else."""
    advice = (
        f"A fire drill is on ({', '.join(sorted(faults))}): nothing is to be mended while it lasts. End it: {_end()}"
    )
    return {
        each: replace(finding, recommendation=advice) if each in _DRILLED else finding
        for each, finding in found.items()
    }


def _end() -> str:
    return admin("/admin/faults", '{"faults":[]}')
