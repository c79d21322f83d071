"""How often a value lay where: a histogram of plain numbers, for what is measured at every step or token."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

LATENCY_BOUNDS_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)
"""From a step of a small model to the longest answer that anybody waits for."""

OVERHEAD_BOUNDS_SECONDS = (0.0001, 0.00025, 0.0005, *LATENCY_BOUNDS_SECONDS)
"""For what should stay far below a step: most of it lies under a millisecond."""


@dataclass(frozen=True, slots=True)
class DistributionView:
    """A Distribution at one moment."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    """Values at or below each bound and above the one before; last, those above all bounds."""
    sum: float

    @property
    def count(self) -> int:
        """All values."""
        return sum(self.counts)

    @property
    def cumulative_counts(self) -> tuple[int, ...]:
        """Values at or below each bound; last, all of them."""
        return tuple(accumulate(self.counts))


class Distribution:
    """Mutable, without a lock: one thread only, views included. Its cost is a bisection and two additions."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds` ascend. Raises ValueError where they do not."""
        self._bounds = tuple(bounds)
        if not self._bounds or any(low >= high for low, high in pairwise(self._bounds)):
            raise ValueError(f"the bounds of a distribution have to ascend, at least one of them: {self._bounds}")
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Count `value`, `count` times."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def view(self) -> DistributionView:
        """What was counted until now; later values do not change it."""
        return DistributionView(self._bounds, tuple(self._counts), self._sum)
