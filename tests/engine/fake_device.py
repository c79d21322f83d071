"""A device and host memory made of plain lists: they hold as 'KV' and 'state' the exact tokens behind them, so wrong
reuse shows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from cache import ContextCache, Copy, CopyObject, Tier
from engine.plan import CopyOutcome, StepPlan

POISON = ("poison",)


class CopyFailedError(Exception):
    """What a copy raises here."""


class FakeDevice:
    """Runs step plans against one cache's units. `tokens_of` gives a request's tokens so far."""

    def __init__(self, cache: ContextCache) -> None:
        self.cache = cache
        self.page_size = cache.options.page_size
        self.pages = [[POISON] * self.page_size for _ in range(cache.pages.capacity)]
        self.slots = [POISON] * max(cache.slots.capacity, 64)
        self.host: list[object] = [POISON] * cache.host.capacity

    def run(self, plan: StepPlan, tokens_of, *, failing: Collection[int] = (), seconds=0.0) -> dict[int, CopyOutcome]:
        """The outcomes of the plan's batches; those whose numbers are in `failing` leave rubbish behind."""
        self.copy(plan.resumes)
        self.poison_free_units()
        for segment in plan.segments:
            self._compute(segment, tuple(tokens_of(segment.request_id)))
        outcomes: dict[int, CopyOutcome] = {}
        for batch in plan.background:
            if batch.number in failing:
                self.spoil_copies(batch.copies)
                outcomes[batch.number] = CopyOutcome(seconds, CopyFailedError())
            else:
                self.copy(batch.copies)
                outcomes[batch.number] = CopyOutcome(seconds)
        return outcomes

    @property
    def under_way(self) -> frozenset[int]:
        """The numbers of batches that are not done: here, all of them are when `run` returns."""
        return frozenset()

    def abandon(self) -> None:
        """A step has failed: nothing is under way when this returns."""

    def copy(self, copies: Iterable[Copy]) -> None:
        for copy in copies:
            self._write(copy, self._read(copy))

    def _read(self, copy: Copy):
        if copy.source.tier is Tier.DEVICE:
            return self.pages[copy.source.unit] if copy.what is CopyObject.KV_PAGE else self.slots[copy.source.unit]
        pieces = [self.host[unit] for unit in copy.source.units]
        assert [(what, number) for what, _, number in pieces] == [(copy.what, i) for i in range(len(pieces))]
        assert len({str(value) for _, value, _ in pieces}) == 1, "an image of several"
        return pieces[0][1]

    def _write(self, copy: Copy, value) -> None:
        is_page = copy.what is CopyObject.KV_PAGE
        if copy.destination.tier is Tier.DEVICE and is_page:
            self.pages[copy.destination.unit] = list(value)
        elif copy.destination.tier is Tier.DEVICE:
            self.slots[copy.destination.unit] = value
        else:
            for number, unit in enumerate(copy.destination.units):
                self.host[unit] = (copy.what, list(value) if is_page else value, number)

    def _compute(self, segment, tokens) -> None:
        table = segment.page_ids.tolist()
        for position in range(segment.start):
            found = self.pages[table[position // self.page_size]][position % self.page_size]
            assert found == tokens[: position + 1], f"{segment.request_id}: KV of position {position}"
        if self.cache.options.has_state and segment.start:
            assert self.slots[segment.state_slot] == tokens[: segment.start], f"{segment.request_id}: state"
        assert segment.token_ids == tokens[segment.start : segment.end]
        for position in range(segment.start, segment.end):
            self.pages[table[position // self.page_size]][position % self.page_size] = tokens[: position + 1]
        if self.cache.options.has_state:
            self.slots[segment.state_slot] = tokens[: segment.end]
            if segment.capture_slot is not None:
                self.slots[segment.capture_slot] = tokens[: segment.end]

    def spoil(self, plan: StepPlan) -> None:
        """What a step may leave behind that failed midway: nothing that it writes is to be trusted."""
        for segment in plan.segments:
            table = segment.page_ids.tolist()
            for position in range(segment.start, segment.end):
                self.pages[table[position // self.page_size]][position % self.page_size] = POISON
            self.slots[segment.state_slot] = POISON
            if segment.capture_slot is not None:
                self.slots[segment.capture_slot] = POISON
        for batch in plan.background:
            self.spoil_copies(batch.copies)

    def spoil_copies(self, copies: Iterable[Copy]) -> None:
        for copy in copies:
            self._write(copy, [POISON] * self.page_size if copy.what is CopyObject.KV_PAGE else POISON)

    def poison_free_units(self) -> None:
        self._poison(self.cache.pages, lambda unit: self.pages.__setitem__(unit, [POISON] * self.page_size))
        self._poison(self.cache.slots, lambda unit: self.slots.__setitem__(unit, POISON))
        self._poison(self.cache.host, lambda unit: self.host.__setitem__(unit, POISON))

    @staticmethod
    def _poison(pool, poison: Callable[[int], None]) -> None:
        held = {unit for lease in pool.leases() for unit in lease.units}
        for unit in set(range(pool.capacity)) - held:
            poison(unit)
