"""Least recently used: the plainest rule, and the one that most engines follow."""

from __future__ import annotations

from bench.policies.protocol import SlotPolicy
from bench.replay.history import Ask, Place


class Lru(SlotPolicy):
    """A place is used when it is taken and when it is resumed from."""

    name = "LRU"

    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        self._order: dict[int, None] = {}

    def used(self, place: Place, ask: Ask) -> None:
        self._order.pop(place.number, None)
        self._order[place.number] = None

    def taken(self, place: Place, ask: Ask) -> None:
        self.used(place, ask)

    def victim(self, ask: Ask, newest: Place) -> int:
        return next(iter(self._order))

    def dropped(self, number: int) -> None:
        del self._order[number]
