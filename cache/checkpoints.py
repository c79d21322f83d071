"""Checkpoints and the order in which they give way."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from cache.pages import Page
from cache.pools import Lease
from cache.tree import Node, PrefixTree, Tokens
from cache.types import CheckpointKind


class Checkpoint:
    """A frontier that can be resumed: the node path's pages, a partial tail page, and a state slot.

    Mutable: only the engine loop's task may touch it. `slot` is None in a model without recurrent states; `tail_page`
    is None when the frontier is a page's end.
    """

    __slots__ = (
        "kind",
        "last_used_at",
        "namespace",
        "node",
        "number",
        "pins",
        "slot",
        "superseded",
        "tail",
        "tail_page",
        "tree",
    )

    def __init__(
        self,
        *,
        number: int,
        namespace: str,
        tree: PrefixTree,
        node: Node,
        tail: Tokens,
        tail_page: Page | None,
        slot: Lease | None,
        kind: CheckpointKind,
        now: float,
    ) -> None:
        self.number = number
        self.namespace = namespace
        self.tree = tree
        self.node = node
        self.tail = tail
        self.tail_page = tail_page
        self.slot = slot
        self.kind = kind
        self.last_used_at = now
        self.pins = 0
        self.superseded = False

    @property
    def frontier_tokens(self) -> int:
        return self.node.depth * self.tree.page_size + len(self.tail)

    @property
    def name(self) -> str:
        return f"checkpoint-{self.number}"

    @property
    def rank(self) -> tuple[bool, float, int]:
        """Smaller gives way first: superseded before the rest, then the one that was not used for longest."""
        return (not self.superseded, self.last_used_at, self.number)


class CheckpointStore:
    """Every checkpoint, and a heap of them by rank. Mutable: only the engine loop's task may touch it.

    The heap is lazy: a checkpoint is pushed again whenever its rank changes, and an entry whose rank is stale is passed
    over, so that each operation is O(log n) amortised.
    """

    def __init__(self) -> None:
        self._all: dict[int, Checkpoint] = {}
        self._heap: list[tuple[tuple[bool, float, int], int]] = []
        self._next_number = 1

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Checkpoint]:
        return iter(self._all.values())

    def __contains__(self, checkpoint: object) -> bool:
        return isinstance(checkpoint, Checkpoint) and self._all.get(checkpoint.number) is checkpoint

    def next_number(self) -> int:
        number = self._next_number
        self._next_number += 1
        return number

    def add(self, checkpoint: Checkpoint) -> None:
        self._all[checkpoint.number] = checkpoint
        self._push(checkpoint)

    def remove(self, checkpoint: Checkpoint) -> None:
        del self._all[checkpoint.number]

    def touch(self, checkpoint: Checkpoint, now: float) -> None:
        """A request uses it: it is the newest now, and whatever superseded it has not made it useless."""
        checkpoint.last_used_at = now
        checkpoint.superseded = False
        self._push(checkpoint)

    def supersede(self, checkpoint: Checkpoint) -> None:
        if not checkpoint.superseded:
            checkpoint.superseded = True
            self._push(checkpoint)

    def unpin(self, checkpoint: Checkpoint) -> None:
        checkpoint.pins -= 1
        if checkpoint.pins == 0 and checkpoint in self:
            self._push(checkpoint)

    def least_valuable(self) -> Checkpoint | None:
        """The unpinned checkpoint with the smallest rank; None when every one is pinned."""
        while self._heap:
            rank, number = self._heap[0]
            checkpoint = self._all.get(number)
            if checkpoint is not None and checkpoint.rank == rank and checkpoint.pins == 0:
                return checkpoint
            heapq.heappop(self._heap)
        return None

    def unreachable(self) -> list[Checkpoint]:
        """Unpinned checkpoints that the heap cannot find; empty when sound."""
        entries = set(self._heap)
        return [c for c in self if c.pins == 0 and (c.rank, c.number) not in entries]

    def _push(self, checkpoint: Checkpoint) -> None:
        heapq.heappush(self._heap, (checkpoint.rank, checkpoint.number))
        if len(self._heap) > 64 + 4 * len(self._all):
            self._heap = [(c.rank, c.number) for c in self]
            heapq.heapify(self._heap)
