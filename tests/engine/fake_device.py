"""A device made of plain lists: it computes as 'KV' and 'state' the exact tokens behind them, so wrong reuse shows."""

from __future__ import annotations

from cache import ContextCache, CopyObject
from engine.plan import StepPlan

POISON = ("poison",)


class FakeDevice:
    """Runs step plans against one cache's units. `tokens_of` gives a request's tokens so far."""

    def __init__(self, cache: ContextCache) -> None:
        self.cache = cache
        self.page_size = cache.options.page_size
        self.pages = [[POISON] * self.page_size for _ in range(cache.pages.capacity)]
        self.slots = [POISON] * max(cache.slots.capacity, 64)

    def run(self, plan: StepPlan, tokens_of) -> None:
        for copy in plan.restores:
            if copy.what is CopyObject.KV_PAGE:
                self.pages[copy.destination.unit] = list(self.pages[copy.source.unit])
            else:
                self.slots[copy.destination.unit] = self.slots[copy.source.unit]
        self.poison_free_units()
        for segment in plan.segments:
            self._compute(segment, tuple(tokens_of(segment.request_id)))

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

    def poison_free_units(self) -> None:
        held = {unit for lease in self.cache.pages.leases() for unit in lease.units}
        for unit in set(range(self.cache.pages.capacity)) - held:
            self.pages[unit] = [POISON] * self.page_size
        held = {unit for lease in self.cache.slots.leases() for unit in lease.units}
        for unit in set(range(self.cache.slots.capacity)) - held:
            self.slots[unit] = POISON
