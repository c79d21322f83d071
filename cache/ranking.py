"""The order in which checkpoints give way (a place holder: superseded first, then the least recently used)."""

from __future__ import annotations

import heapq
from typing import Protocol

from cache.returns import ReturnRates
from cache.types import CheckpointKind


class Rankable(Protocol):
    number: int
    namespace: str
    kind: CheckpointKind
    turns: int
    uses: int
    is_superseded: bool
    benefit_tokens: int
    last_used_at: float


class Ranking:
    def __init__(self, rates: ReturnRates) -> None:
        self._entries: dict[int, tuple[tuple[bool, float, int], Rankable]] = {}
        self._heap: list[tuple[tuple[bool, float, int], int]] = []
        self._counts: dict[str, int] = {}

    def add(self, entry: Rankable) -> None:
        rank = (not entry.is_superseded, entry.last_used_at, entry.number)
        self._entries[entry.number] = (rank, entry)
        self._counts[entry.namespace] = self._counts.get(entry.namespace, 0) + 1
        heapq.heappush(self._heap, (rank, entry.number))
        if len(self._heap) > 64 + 4 * len(self._entries):
            self._heap = [(rank, number) for number, (rank, _) in self._entries.items()]
            heapq.heapify(self._heap)

    def remove(self, entry: Rankable) -> None:
        del self._entries[entry.number]
        left = self._counts[entry.namespace] - 1
        if left:
            self._counts[entry.namespace] = left
        else:
            del self._counts[entry.namespace]

    def least(self, now: float, namespace: str | None = None) -> Rankable | None:
        if namespace is not None:
            mine = [x for x in self._entries.values() if x[1].namespace == namespace]
            return min(mine, key=lambda x: x[0])[1] if mine else None
        while self._heap:
            rank, number = self._heap[0]
            found = self._entries.get(number)
            if found is not None and found[0] == rank:
                return found[1]
            heapq.heappop(self._heap)
        return None

    def value(self, entry: Rankable, now: float) -> float:
        return entry.last_used_at

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, entry: Rankable) -> bool:
        return entry.number in self._entries

    def count(self, namespace: str) -> int:
        return self._counts.get(namespace, 0)

    @property
    def namespaces(self) -> int:
        return len(self._counts)
