"""What would come back if some checkpoints left host memory, where they share pages with others."""

from __future__ import annotations

from collections import Counter

from cache.checkpoints import Checkpoint


class Freed:
    """What host memory would get back from some checkpoints, were they to leave it. Mutable."""

    def __init__(self) -> None:
        self.units = 0
        self.states = 0
        self._let_go: Counter[int] = Counter()

    def add(self, checkpoint: Checkpoint) -> None:
        if checkpoint.host_state is not None:
            self.units += len(checkpoint.host_state)
            self.states += 1
        self.units += 0 if checkpoint.host_tail is None else 1
        node = checkpoint.node
        while node.parent is not None:
            self._let_go[id(node)] += 1
            if self._let_go[id(node)] < node.host_holds:
                return
            self.units += 1
            node = node.parent
