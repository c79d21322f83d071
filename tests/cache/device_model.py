"""A device made of plain lists: it computes 'KV' and 'state' as the exact tokens behind them, so wrong reuse shows."""

from __future__ import annotations

from cache.context import ContextCache
from cache.leases import CaptureTicket, RequestLease
from cache.types import CopyObject

POISON = ("poison",)


class Device:
    """Pages hold, per position, the whole prefix up to it; a state slot holds the prefix that it has consumed."""

    def __init__(self, cache: ContextCache) -> None:
        self.cache = cache
        self.page_size = cache.options.page_size
        self.pages: list[list[tuple[object, ...]]] = [[POISON] * self.page_size for _ in range(cache.pages.capacity)]
        self.states: list[tuple[object, ...]] = [POISON for _ in range(cache.slots.capacity)]

    def restore(self, lease: RequestLease) -> None:
        for copy in lease.restore:
            if copy.what is CopyObject.KV_PAGE:
                self.pages[copy.destination.unit] = list(self.pages[copy.source.unit])
            else:
                self.states[copy.destination.unit] = self.states[copy.source.unit]
        if lease.state_unit is not None and lease.cached_tokens == 0:
            self.states[lease.state_unit] = ()
        self.cache.confirm_restore(lease)

    def compute(self, lease: RequestLease, tokens: tuple[int, ...], start: int, end: int) -> None:
        """Run tokens[start:end], after checking that everything before them is what a cold run would have left."""
        table = lease.page_units
        for position in range(start):
            expected = tokens[: position + 1]
            assert self.pages[table[position // self.page_size]][position % self.page_size] == expected
        if lease.state_unit is not None:
            assert self.states[lease.state_unit] == tokens[:start]
        for position in range(start, end):
            self.pages[table[position // self.page_size]][position % self.page_size] = tokens[: position + 1]
        if lease.state_unit is not None:
            self.states[lease.state_unit] = tokens[:end]

    def capture(self, ticket: CaptureTicket) -> None:
        if ticket.copy is not None:
            self.states[ticket.copy.destination.unit] = self.states[ticket.copy.source.unit]

    def poison_free_units(self) -> None:
        for pool, fill in ((self.cache.pages, "page"), (self.cache.slots, "state")):
            held = {unit for lease in pool.leases() for unit in lease.units}
            for unit in set(range(pool.capacity)) - held:
                if fill == "page":
                    self.pages[unit] = [POISON] * self.page_size
                else:
                    self.states[unit] = POISON
