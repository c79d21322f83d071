"""The last things of one kind: so many at most, and none older than so long."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Recent(Generic[Item]):
    """Mutable: add and ask in the order of time."""

    def __init__(self, seconds: float, most: int) -> None:
        self.seconds = seconds
        self._kept: deque[tuple[float, Item]] = deque(maxlen=most)

    def add(self, item: Item, now: float) -> None:
        self._kept.append((now, item))

    def items(self, now: float) -> list[Item]:
        """Oldest first."""
        while self._kept and now - self._kept[0][0] > self.seconds:
            self._kept.popleft()
        return [item for _, item in self._kept]

    def span_seconds(self, now: float) -> float:
        """Since the oldest; 0 for none."""
        return now - self._kept[0][0] if self._kept else 0.0

    def clear(self) -> None:
        self._kept.clear()
