"""The drill `collapse`: reuse is made to break down, and the daemon has to notice, say so, and come back."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from bench.drill.probes import COLLAPSED, Probes, until
from bench.drill.timeline import Mark, Timeline
from bench.drill.traffic import CONVERSATIONS, Asked, Traffic
from bench.soak.client import SoakClient

MOST_MISSED = 10
"""Requests that may be computed again from their first token, though they could have been reused, until the daemon says
that reuse has collapsed."""

_WARM_ROUNDS = 3
_MOST_ROUNDS_TO_DETECT = 20
_MOST_ROUNDS_TO_HEAL = 8
_CALM_ROUNDS = 2
"""After it has healed, so that each conversation is there again."""
_TELL_SECONDS = 60.0
"""How long insights and metrics may lag behind the state."""

SETTINGS = {
    "engine.max_concurrency": "1",
    "engine.max_context": "2048",
    "engine.prefill_chunk": "128",
    "cache.page_size": "16",
    "cache.kv_pages": "256",
    "cache.device_state_slots": "2",
    "cache.host_cache_mib": "64",
    "cache.host_state_slots": "24",
    "cache.self_heal": "false",
    "ops.log_level": "warning",
}
"""Pools that the conversations fill at once. Self-heal is off, or the daemon would mend a leak before it was seen."""

FLAGS = ("--allow-faults",)

ENVIRONMENT = {"OMP_NUM_THREADS": "1"}
"""The bundled model needs no more, and the machine may have other work."""


class DrillFault(StrEnum):
    """What can be made to fail in this drill."""

    LEAK_HOST_STATE = "leak_host_state"
    REFUSE_PUBLISH = "refuse_publish"


_MEANINGS = {
    DrillFault.LEAK_HOST_STATE: "state images that leave host memory are not given back",
    DrillFault.REFUSE_PUBLISH: "nothing is remembered any more",
}


@dataclass(frozen=True, slots=True)
class Detection:
    """How long the daemon took to say that reuse has collapsed."""

    requests: int
    """Since the fault."""
    missed: int
    """That could have been reused and were computed again."""
    seconds: float
    """From the first of those."""


class CollapseDrill:
    """One drill on one daemon. Mutable: `run` it once."""

    def __init__(self, client: SoakClient, timeline: Timeline, show: Callable[[str], None]) -> None:
        """`show` is told what is going on between two moments."""
        self._probes = Probes(client)
        self._traffic = Traffic(client)
        self._timeline = timeline
        self._show = show
        self._last: deque[Asked] = deque(maxlen=CONVERSATIONS)
        self._reuse = ""

    async def run(self, fault: DrillFault) -> None:
        """The whole drill; what did not happen is in the timeline's failures. Raises DrillError, httpx.HTTPError."""
        if not await self._warm_up():
            return
        detection = await self._break(fault)
        if detection is not None:
            await self._tell_collapse()
        is_well = await self._heal()
        if detection is not None and is_well and not self._timeline.failures:
            self._timeline.add(
                Mark.WELL,
                f"passed: found {detection.seconds:.1f} s after the first request that was computed again needlessly, "
                f"after {detection.missed} of them, and healed without a restart",
            )

    # -- the four parts

    async def _warm_up(self) -> bool:
        for _ in range(_WARM_ROUNDS * CONVERSATIONS):
            await self._ask()
        health = await self._probes.health()
        self._reuse = str(health.get("reuse"))
        missed = sum(asked.is_missed for asked in self._last)
        is_well = health["status"] == "ok" and self._reuse == "healthy" and not missed
        self._timeline.expect(is_well, f"the daemon is not well before the fault: {_line(health)}, {missed} missed")
        if is_well:
            self._timeline.add(
                Mark.WELL,
                f"healthy: {CONVERSATIONS} conversations take turns, {self._share()} of what can be reused is",
                f"GET /health: {_line(health)}",
            )
        return is_well

    async def _break(self, fault: DrillFault) -> Detection | None:
        """Until the daemon says that reuse has collapsed; None when it does not."""
        timeline = self._timeline
        await self._probes.set_faults(fault.value)
        timeline.add(Mark.FAULT, f"the fault {fault.value} is switched on: {_MEANINGS[fault]}")
        if fault is DrillFault.REFUSE_PUBLISH:
            # What was remembered before is kept: only new conversations lose everything.
            self._traffic.begin_anew()
            timeline.add(Mark.NOTE, "all conversations begin anew")
        before, missed, first_missed_at = timeline.requests, 0, timeline.seconds
        for _ in range(_MOST_ROUNDS_TO_DETECT * CONVERSATIONS):
            asked = await self._ask()
            if asked.is_missed:
                missed += 1
                if missed == 1:
                    first_missed_at = timeline.seconds
                    timeline.add(
                        Mark.FAULT,
                        f"the first request is computed again: {asked.cached_tokens:,} of "
                        f"{asked.achievable_tokens:,} tokens were reused that could have been",
                    )
            if not await self._saw_change():
                continue
            found = Detection(timeline.requests - before, missed, timeline.seconds - first_missed_at)
            timeline.add(
                Mark.ALARM,
                f"{_words(self._reuse)}: {found.requests} requests after the fault, "
                f"{found.missed} of them computed again needlessly",
            )
            if self._reuse == "collapsed":
                timeline.expect(
                    missed <= MOST_MISSED, f"that was late: {missed} such requests, at most {MOST_MISSED} were expected"
                )
                return found
        timeline.expect(
            False,
            f"the collapse was not detected: {timeline.requests - before} requests after the fault, {missed} of them "
            f"computed again needlessly, {_words(self._reuse)}",
        )
        return None

    async def _tell_collapse(self) -> None:
        """Whether everybody who should hear of it does."""
        timeline, probes = self._timeline, self._probes

        async def is_open() -> bool:
            return await probes.insight(COLLAPSED) is not None

        timeline.expect(await until(is_open, _TELL_SECONDS), f"the insight {COLLAPSED} did not open")
        insight = await probes.insight(COLLAPSED)
        if insight is not None:
            told = (insight["statement"], f"What to do: {insight['recommendation']}")
            timeline.add(Mark.ALARM, f"the insight {COLLAPSED} is open: {insight['title']}", *told)
        health, (plain, strict) = await probes.health(), await probes.readiness()
        timeline.add(
            Mark.ALARM,
            "health says so, and a balancer that asks strictly sends nobody here",
            f"GET /health: {_line(health)}",
            f"GET /readyz: {plain}; GET /readyz?strict=reuse: {strict}",
        )
        timeline.expect(health["status"] == "degraded", f"/health has the status {health['status']}, not degraded")
        timeline.expect((plain, strict) == (200, 503), f"/readyz answered {plain}, the strict one {strict}")
        await self._expect_metrics("collapsed", is_active=True)

    async def _heal(self) -> bool:
        """Take the cause away and see it come back; whether it did."""
        timeline, probes = self._timeline, self._probes
        await probes.set_faults()
        timeline.add(Mark.HEAL, "the fault is switched off")
        found = await probes.audit()
        if found["remaining"]:
            lost = len(found["violations"])
            timeline.add(
                Mark.HEAL,
                f"an audit finds {lost} violations and, with self-heal off, only tells",
                found["violations"][0],
            )
            dropped = await probes.reset("host")
            units = dropped["tiers"]["host"]["units"]
            given = ", ".join(f"{count:,} of {pool}" for pool, count in units.items())
            timeline.add(Mark.HEAL, f'POST /admin/cache/reset {{"tiers": ["host"]}} gives units back: {given}')
            found = await probes.audit()
        timeline.expect(not found["remaining"], f"the books are still wrong: {found['remaining'][:1]}")
        for _ in range(_MOST_ROUNDS_TO_HEAL * CONVERSATIONS):
            if await self._saw_change():
                timeline.add(Mark.WELL if self._reuse == "healthy" else Mark.HEAL, _words(self._reuse))
            if self._reuse == "healthy":
                break
            await self._ask()
        timeline.expect(self._reuse == "healthy", f"reuse did not heal: {_words(self._reuse)}")
        if self._reuse != "healthy":
            return False
        await self._tell_healed()
        return True

    async def _tell_healed(self) -> None:
        timeline, probes = self._timeline, self._probes

        async def is_clear() -> bool:
            return await probes.insight(COLLAPSED) is None and (await probes.health())["status"] == "ok"

        for _ in range(_CALM_ROUNDS * CONVERSATIONS):
            await self._ask()
        is_well = await until(is_clear, _TELL_SECONDS)
        health, (plain, strict) = await probes.health(), await probes.readiness()
        timeline.expect(is_well, f"the alarm did not clear: {_line(health)}")
        timeline.expect((plain, strict) == (200, 200), f"/readyz answered {plain}, the strict one {strict}")
        await self._expect_metrics("healthy", is_active=False)
        if is_well:
            timeline.add(
                Mark.WELL,
                f"the alarm is over; {self._share()} of what can be reused is",
                f"GET /health: {_line(health)}",
                f"GET /readyz?strict=reuse: {strict}",
            )

    # -- small steps

    async def _ask(self) -> Asked:
        asked = await self._traffic.ask()
        self._timeline.requests = asked.number
        self._last.append(asked)
        self._show(f"{asked.number} requests; of what the last {len(self._last)} could reuse: {self._share()}")
        return asked

    async def _saw_change(self) -> bool:
        """Whether the state of reuse is another than before."""
        before, self._reuse = self._reuse, await self._probes.reuse()
        return before != self._reuse

    async def _expect_metrics(self, state: str, *, is_active: bool) -> None:
        """The series that the alert ReuseCollapsed and its likes read."""
        insight = f'dalsegno_insight_active{{id="{COLLAPSED}",severity="critical"}}'
        wanted = {f'dalsegno_reuse_state{{state="{state}"}}': 1.0, "dalsegno_reuse_degraded": float(is_active)}
        wanted[insight] = float(is_active)
        found: dict[str, float] = {}

        async def is_so() -> bool:
            found.update(await self._probes.metrics())
            return all(found.get(name) == value for name, value in wanted.items())

        is_told = await until(is_so, _TELL_SECONDS)
        told = tuple(f"{name} {found.get(name, 'is absent')}" for name in wanted)
        self._timeline.expect(is_told, f"the metrics do not tell: {'; '.join(told)}")
        if is_told and is_active:
            self._timeline.add(Mark.ALARM, "the metrics that the alert ReuseCollapsed reads say so", *told)

    def _share(self) -> str:
        achievable = sum(asked.achievable_tokens for asked in self._last)
        cached = sum(asked.cached_tokens for asked in self._last)
        return f"{100 * cached / achievable:.0f} %" if achievable else "nothing yet"


def _words(reuse: str) -> str:
    return "reuse has collapsed" if reuse == "collapsed" else f"reuse is {reuse}"


def _line(body: dict[str, Any]) -> str:
    return json.dumps(body, ensure_ascii=False)
