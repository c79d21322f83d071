"""Steps that raise, loops that begin anew, copies that fail."""

from __future__ import annotations

from engine.events import LoopRestarted, StepFailed
from engine.snapshot import EngineSnapshot
from ops.insights.recent import Recent
from ops.insights.rules.base import Rule, counted
from ops.insights.types import Finding, InsightId, Severity

_HELD_SECONDS = 300.0
_CRITICAL_IN_A_ROW = 3
_MOST = 100


class EngineFaults(Rule):
    """Open while one of them was within the last five minutes."""

    id = InsightId.ENGINE_FAULTS

    def __init__(self) -> None:
        self._failures: Recent[StepFailed] = Recent(_HELD_SECONDS, _MOST)
        self._restarts: Recent[LoopRestarted] = Recent(_HELD_SECONDS, _MOST)
        self._lost_copies: Recent[int] = Recent(_HELD_SECONDS, _MOST)
        self._copies_before: int | None = None

    def saw_step_failure(self, failure: StepFailed, now: float) -> None:
        self._failures.add(failure, now)

    def saw_restart(self, restart: LoopRestarted, now: float) -> None:
        self._restarts.add(restart, now)

    def judge(self, snapshot: EngineSnapshot, now: float, *, is_open: bool) -> Finding | None:
        failed_copies = snapshot.cache.restore_failures
        if self._copies_before is not None and failed_copies > self._copies_before:
            self._lost_copies.add(failed_copies - self._copies_before, now)
        self._copies_before = failed_copies
        failures, restarts = self._failures.items(now), self._restarts.items(now)
        copies = sum(self._lost_copies.items(now))
        if not (failures or restarts or copies):
            return None
        requests, in_a_row = sum(each.requests for each in failures), max((f.consecutive for f in failures), default=0)
        parts = []
        if failures:
            causes = ", ".join(sorted({each.cause for each in failures}))
            parts.append(f"{counted(len(failures), 'step')} failed ({causes}) and {counted(requests, 'request')} with")
            parts[-1] += " it" if len(failures) == 1 else " them"
        if restarts:
            parts.append(f"the engine began anew {counted(len(restarts), 'time')} and forgot what it remembered")
        if copies:
            parts.append(f"{counted(copies, 'copy', 'copies')} from host memory failed")
        text = "; ".join(parts)
        evidence = {"step_failures": len(failures), "loop_restarts": len(restarts), "restore_failures": copies}
        is_critical = bool(restarts) or in_a_row >= _CRITICAL_IN_A_ROW
        return Finding(
            severity=Severity.CRITICAL if is_critical else Severity.WARNING,
            title="The engine fails",
            statement=f"In the last five minutes: {text}.",
            evidence=evidence | ({"requests_failed": requests} if failures else {}),
            measured_over={"seconds": _HELD_SECONDS},
            recommendation="Read the log around it (--log-level debug writes tracebacks); check the device's memory "
            "and its driver, then `dalsegno doctor`.",
        )
