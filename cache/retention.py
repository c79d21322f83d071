"""What stays and what gives way: publishing checkpoints into the trees, ranking them, and taking them out again."""

from __future__ import annotations

from collections.abc import Sequence

from cache.checkpoints import Checkpoint, CheckpointStore
from cache.leases import RequestLease
from cache.pools import Holder, Lease, UnitState
from cache.stats import CacheStats
from cache.tree import Node, PrefixTree, Tokens
from cache.types import CacheOptions, CheckpointKind, SkipReason


class Retention:
    """The trees of all namespaces and every checkpoint in them. Mutable: only the engine loop's task may touch it."""

    def __init__(self, options: CacheOptions, stats: CacheStats) -> None:
        self.store = CheckpointStore()
        self.trees: dict[str, PrefixTree] = {}
        self._options = options
        self._stats = stats

    def existing(self, namespace: str, tokens: Tokens) -> Checkpoint | None:
        """The checkpoint at exactly this frontier, if there is one."""
        tree = self.trees.get(namespace)
        if tree is None:
            return None
        node = tree.walk(tokens, len(tokens))[-1]
        start = node.depth * self._options.page_size
        return node.checkpoints.get(tokens[start:]) if len(tokens) - start < self._options.page_size else None

    def publish(
        self, lease: RequestLease, tokens: Tokens, kind: CheckpointKind, slot: Lease | None, now: float
    ) -> None:
        """Make a checkpoint of what `lease` computed for `tokens`; it takes over `slot`, which holds the state
        there."""
        if self.existing(lease.namespace, tokens) is not None:
            self._stats.publish_skipped[SkipReason.ALREADY_CACHED] += 1
            if slot is not None:
                slot.close()
            return
        size = self._options.page_size
        tree = self.trees.setdefault(lease.namespace, PrefixTree(size))
        node = tree.insert(tokens, lease.pages)
        tail = tokens[node.depth * size :]
        tail_page = lease.pages[node.depth] if tail else None
        if tail_page is not None:
            tail_page.ref()
        checkpoint = Checkpoint(
            number=self.store.next_number(),
            namespace=lease.namespace,
            tree=tree,
            node=node,
            tail=tail,
            tail_page=tail_page,
            slot=slot,
            kind=kind,
            now=now,
        )
        if slot is not None:
            slot.rename(Holder(UnitState.CACHED, checkpoint.name))
        tree.attach(node, tail, checkpoint)
        self.store.add(checkpoint)
        self._stats.published[kind] += 1
        self._supersede(checkpoint, tokens)

    def touch(self, checkpoint: Checkpoint, tokens: Tokens, now: float) -> None:
        """A request with this prompt uses it, and with it the shared prefixes that it stands on."""
        self.store.touch(checkpoint, now)
        for ancestor in self._ancestors(checkpoint, tokens):
            if ancestor.kind.is_shared and ancestor is not checkpoint:
                self.store.touch(ancestor, now)

    def expect_turn(self, namespace: str, tokens: Tokens) -> None:
        """A turn that ends here is about to be published: what it will supersede gives way first, to itself even."""
        tree = self.trees.get(namespace)
        nodes = [] if tree is None else tree.walk(tokens, len(tokens))
        for checkpoint in self._on_path(nodes, tokens, len(tokens)):
            if not checkpoint.kind.is_shared:
                self.store.supersede(checkpoint)

    def give_way(self) -> bool:
        """Evict the least valuable checkpoint that nobody uses; False when there is none."""
        victim = self.store.least_valuable()
        if victim is None:
            return False
        self._evict(victim)
        return True

    def give_way_by_a_page(self) -> bool:
        """Shorten the least valuable checkpoint by its last page, which a model without recurrent states can.

        Its KV can be cut anywhere. Where that frees no page, or nothing would be left, the checkpoint goes.
        """
        victim = self.store.least_valuable()
        if victim is None:
            return False
        node = victim.node
        target = node if victim.tail else node.parent
        ends_alone = victim.tail != () or (not node.children and len(node.checkpoints) == 1)
        if target is None or target.parent is None or () in target.checkpoints or not ends_alone:
            self._evict(victim)
            return True
        tail_page = victim.tail_page
        victim.tree.attach(target, (), victim)
        victim.tree.detach(victim)
        victim.node, victim.tail, victim.tail_page = target, (), None
        if tail_page is not None:
            tail_page.unref()
        return True

    def drop(self, checkpoint: Checkpoint) -> None:
        """Take a checkpoint out, and give back what nothing else needs. It must not be pinned."""
        self.store.remove(checkpoint)
        if checkpoint.slot is not None:
            checkpoint.slot.close()
        checkpoint.tree.detach(checkpoint)
        if checkpoint.tail_page is not None:
            checkpoint.tail_page.unref()
        tree = self.trees.get(checkpoint.namespace)
        if tree is not None and tree.root.is_bare:
            del self.trees[checkpoint.namespace]

    def _evict(self, checkpoint: Checkpoint) -> None:
        self._stats.evictions[checkpoint.kind] += 1
        self.drop(checkpoint)

    def _supersede(self, checkpoint: Checkpoint, tokens: Tokens) -> None:
        """Older private checkpoints on the new one's own path give way first; so do endpoints and anchors by nature.

        An endpoint is worth keeping only for clients that echo the answer exactly, an anchor only for forks; being used
        proves either of them.
        """
        if checkpoint.kind in (CheckpointKind.PRIVATE_ENDPOINT, CheckpointKind.PRIVATE_LONG_ANCHOR):
            self.store.supersede(checkpoint)
        if checkpoint.kind is not CheckpointKind.PRIVATE_TURN_CLOSURE:
            return
        for ancestor in self._ancestors(checkpoint, tokens):
            if not ancestor.kind.is_shared and ancestor is not checkpoint:
                self.store.supersede(ancestor)

    def _ancestors(self, checkpoint: Checkpoint, tokens: Tokens) -> list[Checkpoint]:
        """Checkpoints on the path down to this one, itself included, deepest first."""
        nodes = [checkpoint.tree.root, *checkpoint.node.path()]
        return self._on_path(nodes, tokens, checkpoint.frontier_tokens)

    def _on_path(self, nodes: Sequence[Node], tokens: Tokens, limit_tokens: int) -> list[Checkpoint]:
        """Checkpoints on these nodes whose frontier lies within tokens[:limit_tokens], deepest first."""
        size = self._options.page_size
        return [
            checkpoint
            for node in reversed(nodes)
            for tail, checkpoint in node.checkpoints.items()
            if node.depth * size + len(tail) <= limit_tokens
            and tokens[node.depth * size : node.depth * size + len(tail)] == tail
        ]
