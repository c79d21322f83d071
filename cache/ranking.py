"""The order in which checkpoints give way: what each is expected to save for the time that it holds its slot."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, KeysView
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self, TypeAlias

from cache.returns import Group, Returning, ReturnRates, bin_start_seconds, group_of, idle_bin


class Rankable(Returning, Protocol):
    """What a checkpoint offers to be ranked by."""

    @property
    def number(self) -> int:
        """Unique, and growing: the younger has the larger one."""

    @property
    def namespace(self) -> str: ...
    @property
    def is_superseded(self) -> bool: ...
    @property
    def benefit_tokens(self) -> int:
        """Tokens that it saves from its nearest surviving ancestor."""

    @property
    def last_used_at(self) -> float:
        """In seconds, on the clock of every `now`."""


_Place: TypeAlias = tuple[float, int]
"""When an entry was last used, and its number."""


class _Shelf(NamedTuple):
    """Entries that only differ in when they were last used, and by less than twice in what they save."""

    group: Group
    benefit_octave: int


@dataclass(frozen=True, slots=True)
class _Record:
    """An entry with its features as they were when it was added."""

    entry: Rankable
    number: int
    namespace: str
    group: Group
    is_superseded: bool
    benefit_tokens: int
    last_used_at: float

    @classmethod
    def of(cls, entry: Rankable) -> Self:
        return cls(
            entry=entry,
            number=entry.number,
            namespace=entry.namespace,
            group=group_of(entry),
            is_superseded=entry.is_superseded,
            benefit_tokens=entry.benefit_tokens,
            last_used_at=entry.last_used_at,
        )

    @property
    def shelf(self) -> _Shelf:
        return _Shelf(self.group, self.benefit_tokens.bit_length())

    @property
    def place(self) -> _Place:
        return (self.last_used_at, self.number)


class _Order:
    """Records on shelves, on each by last use. Of a shelf, only a few can be the least valuable at any time.

    A place on a shelf is found in O(log n) comparisons. `least` looks at the ends of each shelf and at the valleys of
    its group's curve, and the number of shelves is bounded by groups and octaves, whatever n is.
    """

    def __init__(self) -> None:
        self._records: dict[int, _Record] = {}
        self._superseded: list[_Place] = []
        self._shelves: dict[_Shelf, list[_Place]] = {}

    def __len__(self) -> int:
        return len(self._records)

    def add(self, record: _Record) -> None:
        self._records[record.number] = record
        insort(self._superseded if record.is_superseded else self._shelves.setdefault(record.shelf, []), record.place)

    def remove(self, record: _Record) -> None:
        del self._records[record.number]
        places = self._superseded if record.is_superseded else self._shelves[record.shelf]
        del places[bisect_left(places, record.place)]
        if not places and not record.is_superseded:
            del self._shelves[record.shelf]

    def least(self, rates: ReturnRates, now: float) -> _Record | None:
        """The first to give way: the oldest that is superseded, else the least valuable, of equals the oldest."""
        if self._superseded:
            return self._records[self._superseded[0][1]]
        least: tuple[float, float, int] | None = None
        for shelf, places in self._shelves.items():
            curve = rates.curve(shelf.group)
            for position in _candidates(places, curve.valleys_seconds, now):
                last_used_at, number = places[position]
                benefit_tokens = self._records[number].benefit_tokens
                rank = (benefit_tokens * curve.densities[idle_bin(now - last_used_at)], last_used_at, number)
                if least is None or rank < least:
                    least = rank
        return None if least is None else self._records[least[2]]


def _candidates(places: list[_Place], valleys_seconds: tuple[float, ...], now: float) -> Iterator[int]:
    """Positions of the oldest, of the oldest in the youngest's idle bin, and of those beside each valley.

    Between a peak and a valley the curve only falls or only rises, so that nothing else can be worth less.
    """
    yield 0
    if len(places) == 1:
        return
    older_seconds = bin_start_seconds(idle_bin(now - places[-1][0]) + 1)
    yield min(bisect_right(places, (now - older_seconds, math.inf)), len(places) - 1)
    for valley_seconds in valleys_seconds:
        position = bisect_right(places, (now - valley_seconds, math.inf))
        if position < len(places):
            yield position
        if position > 0:
            yield position - 1


class Ranking:
    """The unpinned entries of one tier, ranked by value. Mutable: only the engine loop's task may touch it.

    Features are read when an entry is added: remove it and add it again when one has changed.
    """

    def __init__(self, rates: ReturnRates) -> None:
        self._rates = rates
        self._records: dict[int, _Record] = {}
        self._all = _Order()
        self._by_namespace: dict[str, _Order] = {}

    def __len__(self) -> int:
        return len(self._records)

    def __contains__(self, entry: Rankable) -> bool:
        return entry.number in self._records

    @property
    def namespaces(self) -> KeysView[str]:
        """Those that have an entry here."""
        return self._by_namespace.keys()

    def count(self, namespace: str) -> int:
        """Entries of one namespace."""
        order = self._by_namespace.get(namespace)
        return 0 if order is None else len(order)

    def add(self, entry: Rankable) -> None:
        """Rank an entry by its features as they are now. ValueError when it is here already."""
        if entry in self:
            raise ValueError(f"checkpoint {entry.number} is ranked already; remove it before adding it again")
        record = _Record.of(entry)
        self._records[record.number] = record
        self._all.add(record)
        self._by_namespace.setdefault(record.namespace, _Order()).add(record)

    def remove(self, entry: Rankable) -> None:
        """Take an entry out, whatever has become of its features since. KeyError when it is not here."""
        record = self._records.pop(entry.number)
        self._all.remove(record)
        order = self._by_namespace[record.namespace]
        order.remove(record)
        if not len(order):
            del self._by_namespace[record.namespace]

    def least(self, now: float, namespace: str | None = None) -> Rankable | None:
        """The next to give way, in all or in one namespace; None when there is none."""
        order = self._all if namespace is None else self._by_namespace.get(namespace)
        record = None if order is None else order.least(self._rates, now)
        return None if record is None else record.entry

    def value(self, entry: Rankable, now: float) -> float:
        """Tokens that it is expected to save for each second that it keeps its slot; 0 when it is superseded."""
        record = self._records.get(entry.number) or _Record.of(entry)
        if record.is_superseded:
            return 0.0
        return record.benefit_tokens * self._rates.density(record.group, now - record.last_used_at)
