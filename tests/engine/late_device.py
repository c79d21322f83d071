"""A fake device whose copies to and from host memory end steps after they began, as they may beside the steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from cache import ContextCache, Tier
from engine.plan import CopyBatch, CopyOutcome, StepPlan
from tests.engine.fake_device import CopyFailedError, FakeDevice


class LateDevice(FakeDevice):
    """`pace` batches end with each step, in the order in which they began; with a step of copies alone, all of them.

    From its beginning to its end nothing is to be relied upon that a batch writes. One that was given up still runs to
    its end, on units that may be somebody else's by now, but before the next step writes anything.
    """

    def __init__(self, cache: ContextCache) -> None:
        super().__init__(cache)
        self.pace = 0
        self.given_up_restores: list[int] = []
        """In the last step."""
        self._flights: deque[CopyBatch] = deque()
        self._awaited: frozenset[int] = frozenset()

    @property
    def under_way(self) -> frozenset[int]:
        return frozenset(batch.number for batch in self._flights)

    def run(self, plan: StepPlan, tokens_of, *, failing: Collection[int] = (), seconds=0.0) -> dict[int, CopyOutcome]:
        assert plan.under_way <= self.under_way, "the books wait for what nobody runs"
        self._awaited = plan.under_way
        outcomes = dict.fromkeys(self._end_those_given_up(), CopyOutcome(seconds))
        super().run(StepPlan(plan.segments, plan.resumes), tokens_of)
        self._awaited |= {batch.number for batch in plan.background}
        for batch in plan.background:
            self.spoil_copies(batch.copies)
            if batch.number in failing:
                outcomes |= dict.fromkeys(self._end(len(self._flights)), CopyOutcome(seconds))
                outcomes[batch.number] = CopyOutcome(seconds, CopyFailedError())
            else:
                self._flights.append(batch)
        ending = min(self.pace, len(self._flights)) if plan.segments else len(self._flights)
        return outcomes | dict.fromkeys(self._end(ending), CopyOutcome(seconds))

    def abandon(self) -> None:
        self._awaited = frozenset()
        self._end(len(self._flights))

    def _end_those_given_up(self) -> list[int]:
        given_up = [place for place, batch in enumerate(self._flights) if batch.number not in self._awaited]
        batches = [self._flights[place] for place in given_up]
        self.given_up_restores = [each.number for each in batches if each.copies[0].source.tier is Tier.HOST]
        return self._end(given_up[-1] + 1 if given_up else 0)

    def _end(self, count: int) -> list[int]:
        """The next `count` run to their ends; returns the numbers of those that are waited for."""
        ended: list[int] = []
        for batch in (self._flights.popleft() for _ in range(count)):
            if batch.number in self._awaited:
                self.copy(batch.copies)
                ended.append(batch.number)
            else:
                self.spoil_copies(batch.copies)
        return ended
