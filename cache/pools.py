"""A pool of equal units (KV pages, state slots) and the leases through which units are held and given back.

A unit is at every moment free, or held by exactly one holder; `Pool.check` proves it. Nothing here knows what a unit
is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class UnitState(StrEnum):
    """The four states whose counts add up to a pool's capacity."""

    FREE = "free"
    CACHED = "cached"
    PINNED = "pinned"
    IN_FLIGHT = "in_flight"


@dataclass(frozen=True, slots=True, eq=False)
class Holder:
    """Who holds a unit: a checkpoint (`cached`), a request (`pinned`) or a copy (`in_flight`), by name. Each is itself
    alone, so that one with the same name is another."""

    state: UnitState
    name: str

    def __post_init__(self) -> None:
        if self.state is UnitState.FREE:
            raise ValueError("a holder is cached, pinned or in_flight; a free unit has no holder")


class PoolExhaustedError(Exception):
    """A pool has fewer free units than were asked for. Nothing was taken."""

    def __init__(self, pool: str, wanted_units: int, free_units: int) -> None:
        super().__init__(f"pool {pool!r}: {wanted_units} units wanted, {free_units} free")
        self.pool = pool
        self.wanted_units = wanted_units
        self.free_units = free_units


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """Units by state; the four add up to `capacity`."""

    capacity: int
    free: int
    cached: int
    pinned: int
    in_flight: int


class Lease:
    """Units of one pool under one holder. Mutable: only the engine loop's task may touch it."""

    __slots__ = ("_holder", "_pool", "_units")

    def __init__(self, pool: Pool, holder: Holder) -> None:
        self._pool = pool
        self._holder = holder
        self._units: list[int] = []

    @property
    def holder(self) -> Holder:
        return self._holder

    @property
    def units(self) -> tuple[int, ...]:
        """The units in the order in which they were taken; empty once closed."""
        return tuple(self._units)

    @property
    def is_open(self) -> bool:
        return self._pool._leases.get(id(self)) is self

    def __len__(self) -> int:
        return len(self._units)

    def grow(self, count: int) -> tuple[int, ...]:
        """Take `count` more units. Raises PoolExhaustedError (and takes none), or ValueError when closed."""
        if not self.is_open:
            raise ValueError(f"lease of {self._holder.name!r} on pool {self._pool.name!r} is closed and cannot grow")
        taken = self._pool._take(count, self)
        self._units.extend(taken)
        return taken

    def shrink(self, units: Iterable[int]) -> None:
        """Give back some of the units. Raises ValueError for a unit that this lease does not hold, and then gives back
        none.
        """
        leaving = set(units)
        foreign = leaving.difference(self._units)
        if foreign:
            raise ValueError(
                f"units {sorted(foreign)} of pool {self._pool.name!r} are not held by {self._holder.name!r}"
            )
        self._units = [unit for unit in self._units if unit not in leaving]
        for unit in sorted(leaving, reverse=True):
            self._pool._give_back(unit, self)

    def rename(self, holder: Holder) -> None:
        """Pass every unit to another holder at once, e.g. from a request to the checkpoint that it leaves behind."""
        self._pool._count(self._holder.state, -len(self._units))
        self._holder = holder
        self._pool._count(holder.state, len(self._units))

    def close(self) -> None:
        """Give back every unit. A lease can be closed any number of times."""
        if not self.is_open:
            return
        for unit in reversed(self._units):
            self._pool._give_back(unit, self)
        self._units.clear()
        del self._pool._leases[id(self)]


class Pool:
    """`capacity` equal units, numbered from 0. Mutable: only the engine loop's task may touch it.

    The unit given back last is handed out first, and a fresh pool hands them out in order, so that the pages of one
    request tend to be adjacent.
    """

    def __init__(self, name: str, capacity: int) -> None:
        if capacity < 0:
            raise ValueError(f"pool {name!r}: capacity must be at least 0, not {capacity}")
        self.name = name
        self.capacity = capacity
        self._free: list[int] = list(range(capacity - 1, -1, -1))
        self._owner: dict[int, Lease] = {}
        self._leases: dict[int, Lease] = {}
        self._held: dict[UnitState, int] = dict.fromkeys(UnitState, 0)

    @property
    def free(self) -> int:
        """Units that nobody holds."""
        return len(self._free)

    def lease(self, holder: Holder, count: int = 0) -> Lease:
        """Open a lease on `count` units. Raises PoolExhaustedError, and then holds nothing."""
        lease = Lease(self, holder)
        self._leases[id(lease)] = lease
        try:
            lease.grow(count)
        except (PoolExhaustedError, ValueError):
            del self._leases[id(lease)]
            raise
        return lease

    def singles(self, holder: Holder, count: int) -> list[Lease]:
        """Open `count` leases of one unit each. Raises PoolExhaustedError, and then holds nothing."""
        if count > len(self._free):
            raise PoolExhaustedError(self.name, count, len(self._free))
        leases: list[Lease] = []
        for _ in range(count):
            lease = Lease(self, holder)
            unit = self._free.pop()
            lease._units.append(unit)
            self._owner[unit] = self._leases[id(lease)] = lease
            leases.append(lease)
        self._count(holder.state, count)
        return leases

    def counts(self) -> PoolCounts:
        return PoolCounts(
            capacity=self.capacity,
            free=self.free,
            cached=self._held[UnitState.CACHED],
            pinned=self._held[UnitState.PINNED],
            in_flight=self._held[UnitState.IN_FLIGHT],
        )

    def leases(self) -> tuple[Lease, ...]:
        """Every open lease."""
        return tuple(self._leases.values())

    def check(self) -> list[str]:
        """Compare the free list, the owners and the leases from scratch; one line per violation, empty when sound."""
        violations: list[str] = []
        free = set(self._free)
        if len(free) != len(self._free):
            violations.append(f"pool {self.name!r}: a unit is on the free list twice")
        held: dict[int, Lease] = {}
        for lease in self._leases.values():
            for unit in lease.units:
                if unit in held:
                    names = (held[unit].holder.name, lease.holder.name)
                    violations.append(f"pool {self.name!r}: unit {unit} is held by {names[0]!r} and {names[1]!r}")
                held[unit] = lease
                if self._owner.get(unit) is not lease:
                    violations.append(
                        f"pool {self.name!r}: unit {unit} of {lease.holder.name!r} has another owner on record"
                    )
                if unit in free:
                    violations.append(f"pool {self.name!r}: unit {unit} of {lease.holder.name!r} is also free")
        for state in (UnitState.CACHED, UnitState.PINNED, UnitState.IN_FLIGHT):
            found = sum(len(lease) for lease in self._leases.values() if lease.holder.state is state)
            if found != self._held[state]:
                violations.append(f"pool {self.name!r}: {self._held[state]} units {state} on record, {found} found")
        violations.extend(
            f"pool {self.name!r}: unit {unit} has an owner but no open lease"
            for unit in self._owner.keys() - held.keys()
        )
        violations.extend(
            f"pool {self.name!r}: unit {unit} is lost: neither free nor held"
            for unit in set(range(self.capacity)) - free - held.keys()
        )
        violations.extend(
            f"pool {self.name!r}: unit {unit} is outside 0..{self.capacity - 1}"
            for unit in sorted((free | held.keys()) - set(range(self.capacity)))
        )
        return violations

    def reclaim_lost(self) -> int:
        """Make every unit free that no open lease holds, whatever the records say; returns how many were not."""
        held = {unit for lease in self._leases.values() for unit in lease.units}
        before = len(set(self._free) - held)
        self._owner = {unit: lease for lease in self._leases.values() for unit in lease.units}
        self._free = [unit for unit in range(self.capacity - 1, -1, -1) if unit not in held]
        return len(self._free) - before

    def _take(self, count: int, lease: Lease) -> tuple[int, ...]:
        if count < 0:
            raise ValueError(f"pool {self.name!r}: cannot take {count} units")
        if count > len(self._free):
            raise PoolExhaustedError(self.name, count, len(self._free))
        taken = tuple(self._free.pop() for _ in range(count))
        for unit in taken:
            self._owner[unit] = lease
        self._count(lease.holder.state, count)
        return taken

    def _give_back(self, unit: int, lease: Lease) -> None:
        if self._owner.get(unit) is not lease:
            raise ValueError(f"pool {self.name!r}: unit {unit} does not belong to {lease.holder.name!r}")
        del self._owner[unit]
        self._free.append(unit)
        self._count(lease.holder.state, -1)

    def _count(self, state: UnitState, change: int) -> None:
        self._held[state] += change
