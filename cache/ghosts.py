"""What was known and is lost: checkpoints without bytes, kept in their trees so that a loss has a reason."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping

from cache.checkpoints import Checkpoint
from cache.held import Held
from cache.tree import NodeCounts, PrefixTree
from cache.types import CacheOptions, Tier


class Ghosts:
    """A bounded list of lost checkpoints, the least recently lost first. Mutable: only the engine loop's task may touch
    it. It also owns the trees, for the last ghost of a namespace takes its tree along.
    """

    def __init__(self, options: CacheOptions, held: Mapping[Tier, Held]) -> None:
        """`held` is what the trees count their pages in."""
        self._held = held
        self.trees: dict[str, PrefixTree] = {}
        self.counts = NodeCounts()
        self._page_size = options.page_size
        self._most_nodes = options.most_ghost_nodes
        self._most = max(64, options.most_ghost_nodes)
        self._all: OrderedDict[int, Checkpoint] = OrderedDict()

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Checkpoint]:
        return iter(self._all.values())

    def __contains__(self, checkpoint: Checkpoint) -> bool:
        return checkpoint.number in self._all

    def tree(self, namespace: str) -> PrefixTree:
        """The namespace's tree, made when it is missing."""
        tree = self.trees.get(namespace)
        if tree is None:
            tree = self.trees[namespace] = PrefixTree(self._page_size, self.counts, namespace, self._held)
        return tree

    def add(self, checkpoint: Checkpoint) -> None:
        self._all[checkpoint.number] = checkpoint
        self._all.move_to_end(checkpoint.number)

    def remove(self, checkpoint: Checkpoint) -> None:
        """It lives again. Harmless for one that is no ghost."""
        self._all.pop(checkpoint.number, None)

    def forget(self, checkpoint: Checkpoint) -> None:
        """Take it out of its tree, and with it what of the tree nothing needs any more. It holds nothing."""
        self.remove(checkpoint)
        checkpoint.tree.detach(checkpoint)
        if checkpoint.tree.root.is_bare and self.trees.get(checkpoint.namespace) is checkpoint.tree:
            del self.trees[checkpoint.namespace]

    def trim(self) -> None:
        """Forget the oldest until no more is known than the limit allows."""
        while self._all and (self.counts.ghosts > self._most_nodes or len(self._all) > self._most):
            self.forget(next(iter(self._all.values())))

    def clear(self) -> None:
        for checkpoint in tuple(self._all.values()):
            self.forget(checkpoint)
