"""Reuse that fails for want of memory, and reuse that is not worth its copies: neither is a fault."""

from __future__ import annotations

from dataclasses import dataclass

from cache import LossReason, ReuseReport
from engine.events import LoopRestarted
from engine.snapshot import EngineSnapshot
from ops.insights.recent import Recent
from ops.insights.rules.base import Facts, Rule, counted, percent
from ops.insights.types import Finding, InsightId, Severity

_WINDOW_SECONDS = 600.0
_MOST = 1000
_LEAST_REQUESTS = 20
_LEAST_LOSSES = 5
_OPENS_AT, _CLEARS_AT = 0.25, 0.10
"""Of the achievable tokens."""


@dataclass(frozen=True, slots=True)
class _Ask:
    prompt: int
    achievable: int
    reused: int
    lost: int
    lost_states: int = 0


class _Share(Rule):
    """A share of the achievable tokens over the last ten minutes."""

    opens_at = _OPENS_AT

    def __init__(self) -> None:
        self._recent: Recent[_Ask] = Recent(_WINDOW_SECONDS, _MOST)

    def saw_reuse(self, report: ReuseReport, now: float) -> None:
        if report.achievable_tokens > 0:
            self._recent.add(self._ask(report), now)

    def saw_restart(self, restart: LoopRestarted, now: float) -> None:
        self._recent.clear()

    def judge(self, snapshot: EngineSnapshot, now: float, *, is_open: bool) -> Finding | None:
        asks = self._recent.items(now)
        achievable, lost = sum(ask.achievable for ask in asks), sum(ask.lost for ask in asks)
        losses = sum(ask.lost > 0 for ask in asks)
        if is_open:
            holds = lost > _CLEARS_AT * achievable
        else:
            holds = len(asks) >= _LEAST_REQUESTS and losses >= _LEAST_LOSSES and lost >= self.opens_at * achievable
        if not holds:
            return None
        return self._say(snapshot, asks, round(self._recent.span_seconds(now)))

    def _ask(self, report: ReuseReport) -> _Ask:
        raise NotImplementedError

    def _say(self, snapshot: EngineSnapshot, asks: list[_Ask], seconds: int) -> Finding:
        raise NotImplementedError


class CapacitySmall(_Share):
    """What even a cache without a fault could not have kept."""

    id = InsightId.CAPACITY_SMALL

    def __init__(self, facts: Facts | None) -> None:
        super().__init__()
        self._facts = facts

    def _ask(self, report: ReuseReport) -> _Ask:
        states = report.lost.get(LossReason.EVICTED_STATE, 0)
        evicted = states + report.lost.get(LossReason.EVICTED_KV, 0)
        beyond = max(report.achievable_tokens - max(report.cached_tokens, report.expected_tokens), 0)
        return _Ask(report.prompt_tokens, report.achievable_tokens, report.cached_tokens, min(evicted, beyond), states)

    def _say(self, snapshot: EngineSnapshot, asks: list[_Ask], seconds: int) -> Finding:
        achievable, lost = sum(ask.achievable for ask in asks), sum(ask.lost for ask in asks)
        usual_tokens = sum(ask.prompt for ask in asks) // len(asks)
        fits = self._fits(snapshot, usual_tokens)
        conversations = fits.get("conversations_that_fit")
        room = "" if conversations is None else f" About {conversations:,} conversations of this length fit at a time."
        misses, reused = sum(ask.lost > 0 for ask in asks), sum(ask.reused for ask in asks)
        return Finding(
            severity=Severity.NOTICE,
            title="More conversations are alive than fit in memory",
            statement=f"{percent(lost, achievable)} of what could have been reused had to give way to others: "
            f"{lost:,} of {achievable:,} tokens, in {misses:,} of {counted(len(asks), 'request')}; "
            f"{percent(reused, achievable)} was reused.{room}",
            evidence={
                "tokens_lost_to_memory": lost,
                "reused_tokens": reused,
                "achievable_tokens": achievable,
                "requests_that_lost": misses,
                "mean_prompt_tokens": usual_tokens,
                **fits,
            },
            measured_over={"requests": len(asks), "seconds": seconds},
            recommendation=_more_room(snapshot, is_state=2 * sum(ask.lost_states for ask in asks) > lost),
        )

    def _fits(self, snapshot: EngineSnapshot, usual_tokens: int) -> dict[str, int]:
        """As many as the larger of the two tiers holds."""
        facts, fits = self._facts, dict[str, int]()
        rooms: list[int] = []
        if snapshot.state_slots.capacity:
            running = facts.max_concurrency if facts is not None else 0
            rooms.append(max(snapshot.state_slots.capacity - running, snapshot.host_state_slots.capacity))
        if facts is not None:
            fits["tokens_that_fit"] = facts.page_tokens * max(snapshot.kv_pages.capacity, snapshot.host_units.capacity)
            rooms.append(fits["tokens_that_fit"] // max(usual_tokens, 1))
        if rooms:
            fits["conversations_that_fit"] = min(rooms)
        return fits


def _more_room(snapshot: EngineSnapshot, *, is_state: bool) -> str:
    if is_state:
        host = "--host-state-slots and --host-cache-mib" if snapshot.host_units.capacity else "--host-cache-mib"
        return f"State images are what is short: raise {host} (host memory), or --device-state-slots."
    return "KV is what is short: raise --host-cache-mib (host memory), or --kv-cache-mib on the device."


class StructuralFloor(_Share):
    """What is there, and quicker computed than copied back."""

    id = InsightId.STRUCTURAL_FLOOR
    opens_at = 0.3

    def _ask(self, report: ReuseReport) -> _Ask:
        structural = report.lost.get(LossReason.STRUCTURAL, 0)
        return _Ask(report.prompt_tokens, report.achievable_tokens, report.cached_tokens, structural)

    def _say(self, snapshot: EngineSnapshot, asks: list[_Ask], seconds: int) -> Finding:
        small = [ask for ask in asks if ask.lost > 0]
        usual_tokens = sum(ask.prompt for ask in small) // len(small)
        measured: dict[str, int | float] = {}
        if snapshot.restore_bytes_per_second is not None:
            measured["restore_bytes_per_second"] = round(snapshot.restore_bytes_per_second)
        if snapshot.prefill_tokens_per_second is not None:
            measured["prefill_tokens_per_second"] = round(snapshot.prefill_tokens_per_second)
        return Finding(
            severity=Severity.INFO,
            title="Prompts are too short to be worth reusing",
            statement=f"{len(small):,} of {counted(len(asks), 'request')} could have been resumed, but copying the "
            f"state back takes longer than computing their {usual_tokens:,} tokens (on average) anew. They lose "
            "nothing by it.",
            evidence={
                "requests_below_the_reuse_unit": len(small),
                "mean_prompt_tokens": usual_tokens,
                "structural_tokens": sum(ask.lost for ask in small),
                **measured,
            },
            measured_over={"requests": len(asks), "seconds": seconds},
            recommendation="Nothing to mend. More --device-state-slots would keep them where no copy is needed.",
        )
