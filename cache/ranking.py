"""The order in which checkpoints give way: what each is expected to save for the time that it holds its slot."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, KeysView, Mapping
from dataclasses import dataclass
from typing import Protocol, Self, TypeAlias

from cache.regret import Regret
from cache.returns import Curve, Group, Returning, ReturnRates, bin_start_seconds, group_of, idle_bin


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
    def is_plain(self) -> bool:
        """Whether a plain cache of the same size would hold it."""

    @property
    def benefit_tokens(self) -> int:
        """Tokens that it saves from its nearest surviving ancestor that is shared or not superseded."""

    @property
    def last_used_at(self) -> float:
        """In seconds, on the clock of every `now`."""


_Place: TypeAlias = tuple[float, int]
"""When an entry was last used, and its number."""

_Rank: TypeAlias = tuple[float, _Place]
"""Smaller gives way first: by value, of equals the oldest."""


@dataclass(frozen=True, slots=True)
class _Record:
    """An entry with its features as they were when it was added."""

    entry: Rankable
    number: int
    namespace: str
    group: Group
    is_superseded: bool
    is_plain: bool
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
            is_plain=entry.is_plain,
            benefit_tokens=entry.benefit_tokens,
            last_used_at=entry.last_used_at,
        )

    @property
    def octave(self) -> int:
        """The largest power of two that the benefit reaches, as its exponent plus one; 0 without any benefit."""
        return self.benefit_tokens.bit_length()

    @property
    def place(self) -> _Place:
        return (self.last_used_at, self.number)


class _Shelves:
    """Records that are not superseded: a shelf for each group and octave of benefit, and on it by last use.

    A place on a shelf is found in O(log n) comparisons. `least` looks closely at few shelves, and there at the
    ends and at the valleys of the group's curve; the number of shelves is bounded by groups and octaves, whatever n is.
    """

    def __init__(self, records: Mapping[int, _Record]) -> None:
        """`records` are looked up by number."""
        self._records = records
        self._shelves: dict[Group, dict[int, list[_Place]]] = {}

    def __bool__(self) -> bool:
        return bool(self._shelves)

    def add(self, record: _Record) -> None:
        insort(self._shelves.setdefault(record.group, {}).setdefault(record.octave, []), record.place)

    def remove(self, record: _Record) -> None:
        shelves = self._shelves[record.group]
        places = shelves[record.octave]
        del places[bisect_left(places, record.place)]
        if not places:
            del shelves[record.octave]
        if not shelves:
            del self._shelves[record.group]

    def least(self, rates: ReturnRates, now: float) -> _Record | None:
        """The least valuable, of equals the oldest."""
        shelves = sorted(
            (_floor(octave, places, curve, now), places[0], places, curve)
            for group, by_octave in self._shelves.items()
            for curve in (rates.curve(group),)
            for octave, places in by_octave.items()
        )
        least: _Rank = (math.inf, (0.0, 0))
        for floor, oldest, places, curve in shelves:
            if (floor, oldest) > least:
                break
            for place in _candidates(places, curve, now):
                benefit_tokens = self._records[place[1]].benefit_tokens
                least = min(least, (benefit_tokens * curve.densities[idle_bin(now - place[0])], place))
        return self._records[least[1][1]] if shelves else None


class _Order:
    """Records in the order in which they give way."""

    def __init__(self) -> None:
        self._records: dict[int, _Record] = {}
        self._superseded: list[_Place] = []
        self._current = _Shelves(self._records)
        self._unplain = _Shelves(self._records)
        """Of the current ones those that a plain cache would not hold."""

    def __len__(self) -> int:
        return len(self._records)

    def add(self, record: _Record) -> None:
        self._records[record.number] = record
        if record.is_superseded:
            insort(self._superseded, record.place)
            return
        self._current.add(record)
        if not record.is_plain:
            self._unplain.add(record)

    def remove(self, record: _Record) -> None:
        del self._records[record.number]
        if record.is_superseded:
            del self._superseded[bisect_left(self._superseded, record.place)]
            return
        self._current.remove(record)
        if not record.is_plain:
            self._unplain.remove(record)

    def least(self, rates: ReturnRates, now: float, *, spares_plain: bool) -> _Record | None:
        """The first to give way: the oldest that is superseded, else the least valuable; `spares_plain` is whether what
        a plain cache would hold goes last."""
        if self._superseded:
            return self._records[self._superseded[0][1]]
        shelves = self._unplain if spares_plain and self._unplain else self._current
        return shelves.least(rates, now)


def _floor(octave: int, places: list[_Place], curve: Curve, now: float) -> float:
    """What no entry on this shelf is worth less than, so that most shelves need no closer look."""
    youngest, oldest = idle_bin(now - places[-1][0]), idle_bin(now - places[0][0])
    return (1 << octave >> 1) * min(curve.densities[youngest : oldest + 1])


def _candidates(places: list[_Place], curve: Curve, now: float) -> Iterator[_Place]:
    """The oldest, the oldest in the youngest's idle bin, and those beside each valley.

    Between a peak and a valley the curve only falls or only rises, so that nothing else can be worth less.
    """
    yield places[0]
    if len(places) == 1:
        return
    older_seconds = bin_start_seconds(idle_bin(now - places[-1][0]) + 1)
    yield places[min(bisect_right(places, (now - older_seconds, math.inf)), len(places) - 1)]
    for valley_seconds in curve.valleys_seconds:
        position = bisect_right(places, (now - valley_seconds, math.inf))
        if position < len(places):
            yield places[position]
        if position > 0:
            yield places[position - 1]


class Ranking:
    """The unpinned entries of one tier, ranked by value. Mutable: only the engine loop's task may touch it.

    Features are read when an entry is added: remove it and add it again when one has changed.
    """

    def __init__(self, rates: ReturnRates, regret: Regret) -> None:
        self._rates = rates
        self._regret = regret
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
        record = None if order is None else order.least(self._rates, now, spares_plain=self._regret.is_due)
        return None if record is None else record.entry

    def value(self, entry: Rankable, now: float) -> float:
        """Tokens that it is expected to save for each second that it keeps its slot; 0 when it is superseded."""
        record = self._records.get(entry.number) or _Record.of(entry)
        if record.is_superseded:
            return 0.0
        return record.benefit_tokens * self._rates.density(record.group, now - record.last_used_at)
