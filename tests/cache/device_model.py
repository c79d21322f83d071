"""A device and host memory made of plain lists: 'KV' and 'state' are the exact tokens behind them, so wrong reuse
shows."""

from __future__ import annotations

from collections.abc import Iterable

from cache.context import ContextCache
from cache.leases import CaptureTicket, RequestLease
from cache.types import Copy, CopyObject, Tier

POISON = ("poison",)


class Device:
    """Pages hold, per position, the whole prefix up to it; a state slot holds the prefix that it has consumed."""

    def __init__(self, cache: ContextCache) -> None:
        self.cache = cache
        self.page_size = cache.options.page_size
        self.pages: list[list[tuple[object, ...]]] = [[POISON] * self.page_size for _ in range(cache.pages.capacity)]
        self.states: list[tuple[object, ...]] = [POISON for _ in range(cache.slots.capacity)]
        self.host: list[object] = [POISON for _ in range(cache.host.capacity)]

    def run(self, copies: Iterable[Copy]) -> None:
        for copy in copies:
            self._write(copy, self._read(copy))

    def spoil(self, copies: Iterable[Copy]) -> None:
        """What copies may leave behind that failed midway."""
        for copy in copies:
            self._write(copy, [POISON] * self.page_size if copy.what is CopyObject.KV_PAGE else POISON)

    def _read(self, copy: Copy):
        if copy.source.tier is Tier.HOST:
            values = [self.host[unit] for unit in copy.source.units]
            if copy.what is CopyObject.KV_PAGE:
                return values[0]
            # Each unit of a state image has its own piece of it: they must all be there, and in order.
            assert [piece for _, piece in values] == list(range(len(values)))
            assert len({state for state, _ in values}) == 1
            return values[0][0]
        return self.pages[copy.source.unit] if copy.what is CopyObject.KV_PAGE else self.states[copy.source.unit]

    def _write(self, copy: Copy, value) -> None:
        units = copy.destination.units
        if copy.what is CopyObject.KV_PAGE:
            (self.host if copy.destination.tier is Tier.HOST else self.pages)[units[0]] = list(value)
        elif copy.destination.tier is Tier.HOST:
            for piece, unit in enumerate(units):
                self.host[unit] = (value, piece)
        else:
            self.states[units[0]] = value

    def resume(self, lease: RequestLease) -> None:
        """Run what is to be run right before the first step."""
        self.run(lease.resume)
        if lease.state_unit is not None and lease.cached_tokens == 0:
            self.states[lease.state_unit] = ()
        self.cache.confirm_resume(lease)

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
            self.run([ticket.copy])

    def poison_free_units(self) -> None:
        pools = ((self.cache.pages, self.pages), (self.cache.slots, self.states), (self.cache.host, self.host))
        for pool, contents in pools:
            held = {unit for lease in pool.leases() for unit in lease.units}
            for unit in set(range(pool.capacity)) - held:
                contents[unit] = [POISON] * self.page_size if contents is self.pages else POISON
