"""A bound: evicts with the whole future in view."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from bench.policies.protocol import SlotPolicy
from bench.replay.history import Ask, Place
from bench.replay.requests import SimRequest

NEVER = 1 << 60
BOUND = "clairvoyant (bound)"
WEIGHTS = (0.0, 0.25, 0.5, 1.0)


class Clairvoyant(SlotPolicy):
    """Evicts what is resumed from last: the smallest (tokens saved) ** weight / (requests until then).

    A place is resumed from by the next request through it that no deeper held place serves better, and saves what lies
    between it and the held place above. Weight 0 is the farthest next use (Belady, 1966), the best there is where all
    places save alike and none lies above another; elsewhere the best of some weights is taken, so it is a bound in
    practice, not by proof.
    """

    def __init__(self, slots: int, future: Future, weight: float = 0.0) -> None:
        super().__init__(slots)
        self.name = BOUND if weight else "farthest next use"
        self.weight = weight
        self._future = future
        self._now = -1
        rows = slots + 1
        self._next = np.full(rows, NEVER)
        self._saved = np.zeros(rows)
        self._places = [Place(-1, 0)] * rows
        self._row: dict[int, int] = {}
        self._free = list(range(rows))

    def serve(self, ask: Ask, request: SimRequest | None = None) -> int:
        self._now = ask.number
        return super().serve(ask, request)

    def used(self, place: Place, ask: Ask) -> None:
        self._look_ahead(place)

    def taken(self, place: Place, ask: Ask) -> None:
        row = self._row[place.number] = self._free.pop()
        self._places[row] = place
        self._look_ahead(place)
        self._look_ahead_around(place)

    def victim(self, ask: Ask, newest: Place) -> int:
        if self.weight:
            worth = self._saved**self.weight / (self._next - self._now)
            return self._places[int(np.argmin(worth))].number
        return self._places[int(np.argmax(self._next))].number

    def dropped(self, number: int) -> None:
        row = self._row.pop(number)
        self._free.append(row)
        place = self._places[row]
        self._look_ahead_around(place)

    def _look_ahead(self, place: Place) -> None:
        """When it is resumed from next, as things are held now, and what that saves."""
        row = self._row[place.number]
        for number in self._future.after(place, self._now):
            path = self._future.paths[number]
            deepest = next(p for p in reversed(path) if p.number in self.held)
            if deepest.number == place.number:
                above = (p.tokens for p in reversed(path) if p.tokens < place.tokens and p.number in self.held)
                self._next[row], self._saved[row] = number, place.tokens - next(above, 0)
                return
        self._next[row], self._saved[row] = NEVER, 0

    def _look_ahead_around(self, place: Place) -> None:
        """Whether a place is held matters to those above it, and to what those below it save."""
        number = next(self._future.after(place, self._now), None)
        if number is None:
            return
        for above in self._future.paths[number]:
            if above.tokens < place.tokens and above.number in self.held:
                self._look_ahead(above)
        if not self.weight:
            return
        for row in self._row.values():
            other = self._places[row]
            if other.tokens > place.tokens and place in self._future.paths_of(int(self._next[row])):
                self._look_ahead(other)


class Future:
    """Which requests pass each place."""

    def __init__(self, asks: Sequence[Ask]) -> None:
        self.paths = [ask.path for ask in asks]
        self._sets = [frozenset(ask.path) for ask in asks]
        self._uses: defaultdict[int, list[int]] = defaultdict(list)
        for ask in asks:
            for place in ask.path:
                self._uses[place.number].append(ask.number)

    def after(self, place: Place, number: int) -> Iterator[int]:
        """The requests after that one which pass the place, in order."""
        uses = self._uses.get(place.number, [])
        return (uses[index] for index in range(bisect_right(uses, number), len(uses)))

    def paths_of(self, number: int) -> frozenset[Place]:
        return self._sets[number] if number < len(self._sets) else frozenset()
