"""What becomes a checkpoint and what it is worth: publishing, using, superseding, forgetting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile

from cache.checkpoints import Checkpoint
from cache.expectation import Expectation
from cache.faults import Fault
from cache.leases import Match, RequestLease
from cache.pools import Holder, Lease, UnitState
from cache.tiers import Tiers
from cache.tree import Tokens
from cache.types import CheckpointKind, LossReason, SkipReason, Tier


class Retention:
    """Writes checkpoints into the trees. Mutable: only the engine loop's task may touch it."""

    def __init__(self, tiers: Tiers, leases: Mapping[str, RequestLease]) -> None:
        self._tiers = tiers
        self.expectation = Expectation(tiers.options, leases, tiers.store.place)

    def find(self, namespace: str, tokens: Tokens) -> Checkpoint | None:
        """The checkpoint at exactly this frontier, live or lost."""
        tree = self._tiers.ghosts.trees.get(namespace)
        if tree is None:
            return None
        node = tree.walk(tokens, len(tokens))[-1]
        start = node.depth * tree.page_size
        return node.checkpoints.get(tokens[start:]) if len(tokens) - start < tree.page_size else None

    def is_cached(self, namespace: str, tokens: Tokens) -> bool:
        """Whether this frontier can be resumed already."""
        found = self.find(namespace, tokens)
        return found is not None and (found.is_in_host or self._is_on_device(found))

    def publish(
        self, lease: RequestLease, tokens: Tokens, kind: CheckpointKind, slot: Lease | None, now: float
    ) -> None:
        """Make a checkpoint of what `lease` computed for `tokens`; it takes over `slot`, which has the state there."""
        tiers = self._tiers
        checkpoint = self.find(lease.namespace, tokens)
        reason = SkipReason.FAULT if Fault.REFUSE_PUBLISH in tiers.faults else None
        if checkpoint is not None and self._is_on_device(checkpoint):
            reason = SkipReason.ALREADY_CACHED
        if reason is not None:
            tiers.stats.publish_skipped[reason] += 1
            if checkpoint is not None and reason is SkipReason.ALREADY_CACHED:
                self._again(lease, checkpoint, tokens)
            if slot is not None:
                slot.close()
            if reason.is_loss:
                self.miss_out(lease, tokens, kind, LossReason.PUBLISH_SKIPPED)
            return
        if checkpoint is None:
            checkpoint = self._new(lease.namespace, tokens, kind)
        tiers.ghosts.remove(checkpoint)
        self._land(checkpoint, lease, slot)
        if checkpoint.loss is not None or kind is CheckpointKind.PRIVATE_TURN_CLOSURE:
            checkpoint.kind = kind
        checkpoint.loss = None
        checkpoint.is_superseded = checkpoint.is_refused = False
        checkpoint.last_used_at = now
        tiers.stats.published[kind] += 1
        ancestors = self._ancestors(checkpoint, tokens)
        self._weigh(checkpoint, ancestors)
        self.expectation.computed(checkpoint, ancestors, lease)
        if checkpoint not in tiers.store:
            tiers.store.rates.arrived(checkpoint)
        tiers.store.add(checkpoint)
        if kind.is_shared:
            tiers.refresh_below(checkpoint)
        if Fault.DROP_STATE in tiers.faults and checkpoint.slot is not None and checkpoint.pins == 0:
            tiers.drop_slot(checkpoint)
        tiers.ghosts.trim()

    def miss_out(
        self, lease: RequestLease, tokens: Tokens, kind: CheckpointKind, reason: LossReason, *, gives_way: bool = False
    ) -> None:
        """Remember that this frontier was computed and not kept; `gives_way` is whether for want of room."""
        if not tokens:
            return
        checkpoint = self.find(lease.namespace, tokens)
        if checkpoint is None or checkpoint.loss is not None:
            if checkpoint is None:
                checkpoint = self._new(lease.namespace, tokens, kind)
            checkpoint.loss, checkpoint.gave_way, checkpoint.is_bet = reason, gives_way, False
            checkpoint.last_used_at = self._tiers.now
            self._tiers.ghosts.add(checkpoint)
        self.expectation.computed(checkpoint, self._ancestors(checkpoint, tokens), lease)
        self._tiers.ghosts.trim()

    def learn(self, match: Match, now: float) -> None:
        """What is used, and what would have been had it not been lost, shows what is worth keeping.

        A conversation that goes on has come back to each of its own checkpoints that nothing supersedes: credited to
        the deepest alone, the others would look like something to which nobody returns.
        """
        served = [c for c in (match.known.lost, match.nearest) if c is not None and self._is_known(c)]
        rates, tree = self._tiers.store.rates, match.known.tree
        if tree is not None:
            for c in tree.checkpoints_on(match.known.nodes, match.tokens, len(match.tokens) - 1):
                if (c in served) if c.kind.is_shared else not c.is_superseded:
                    rates.returned(c, max(now - c.last_used_at, 0.0))
        for checkpoint in served:
            self.use(checkpoint, match.tokens, now)

    def compare(self, match: Match) -> None:
        """A request is let in: did it find less than it would have in a plain cache?"""
        self._tiers.store.regret.saw(
            cached_tokens=match.cached_tokens,
            plain_tokens=self.expectation.plain(match).tokens,
            achievable_tokens=match.known.achievable_tokens,
            held_tokens=self.expectation.held_tokens,
        )

    def clear(self) -> None:
        """All that a plain cache would hold is dropped, and what it would have saved counts no more."""
        self.expectation.clear()
        self._tiers.store.regret.clear()

    def again(self, lease: RequestLease, tokens: Tokens) -> None:
        """This frontier was computed once more although it is there: it waits anew."""
        found = self.find(lease.namespace, tokens)
        if found is not None:
            self._again(lease, found, tokens)

    def use(self, checkpoint: Checkpoint, tokens: Tokens, now: float) -> None:
        """A request with this prompt uses it, or would have, and with it the shared prefixes that it stands on."""
        used = [checkpoint, *(c for c in self._ancestors(checkpoint, tokens) if c.kind.is_shared)]
        for each in used:
            each.uses += 1 if each is checkpoint else 0
            each.tree.has_returns = True
            each.last_used_at = now
            each.is_refused = False
            if each is checkpoint or not each.is_one_lines:
                each.is_superseded = False  # Whatever superseded it has not made it useless.
            each.benefit_tokens = each.frontier_tokens - self._tiers.surviving_ancestor_tokens(each)
            self._tiers.store.place(each)
        self.expectation.used(used)

    def expect_turn(self, namespace: str, tokens: Tokens) -> None:
        """A turn that ends here is about to be published: what it will supersede gives way first, to itself even."""
        tree = self._tiers.ghosts.trees.get(namespace)
        if tree is None:
            return
        is_new_line = self.find(namespace, tokens) is None
        for checkpoint in tree.checkpoints_on(tree.walk(tokens, len(tokens)), tokens, len(tokens)):
            is_new_line = is_new_line and checkpoint.kind is not CheckpointKind.PRIVATE_TURN_CLOSURE
            if checkpoint.is_one_lines and not (checkpoint.lines and is_new_line):
                self._supersede(checkpoint)

    def _again(self, lease: RequestLease, checkpoint: Checkpoint, tokens: Tokens) -> None:
        self._tiers.store.rates.arrived(checkpoint)
        self.expectation.computed(checkpoint, self._ancestors(checkpoint, tokens), lease)

    def _is_known(self, checkpoint: Checkpoint) -> bool:
        return checkpoint in self._tiers.store or checkpoint in self._tiers.ghosts

    def _is_on_device(self, checkpoint: Checkpoint) -> bool:
        has_state = checkpoint.slot is not None or not self._tiers.options.has_state
        return checkpoint.loss is None and checkpoint.is_whole_on_device and has_state

    def _new(self, namespace: str, tokens: Tokens, kind: CheckpointKind) -> Checkpoint:
        tree = self._tiers.ghosts.tree(namespace)
        node = tree.insert(tokens)
        tail = tokens[node.depth * tree.page_size :]
        number = self._tiers.store.next_number()
        checkpoint = Checkpoint(number=number, namespace=namespace, tree=tree, node=node, tail=tail, kind=kind)
        is_fork = kind is CheckpointKind.SHARED_BRANCH or (kind.is_shared and node.goes_on_behind(tail))
        checkpoint.lines = 1 if is_fork else 0
        tree.attach(node, tail, checkpoint)
        ancestors = self._ancestors(checkpoint, tokens)
        before = next((c for c in ancestors if not c.kind.is_shared), None)
        if before is not None:
            checkpoint.turns = before.turns + (1 if kind is CheckpointKind.PRIVATE_TURN_CLOSURE else 0)
        if kind is CheckpointKind.PRIVATE_TURN_CLOSURE:
            for each in takewhile(lambda c: c.kind is not CheckpointKind.PRIVATE_TURN_CLOSURE, ancestors):
                each.lines += 1 if each.kind.is_shared else 0
        return checkpoint

    def _land(self, checkpoint: Checkpoint, lease: RequestLease, slot: Lease | None) -> None:
        """Let it reside on the device: the tree takes over the pages that it has not."""
        tree, former = checkpoint.tree, checkpoint.device_node
        if former is not checkpoint.node:
            tree.hold(checkpoint.node, Tier.DEVICE, lease.pages)
            if former is not None:
                tree.let_go(former, Tier.DEVICE)
            checkpoint.device_node = checkpoint.node
        if checkpoint.tail and checkpoint.tail_page is None:
            page = lease.pages[checkpoint.node.depth]
            page.ref()
            tree.change_tail(checkpoint, lambda: setattr(checkpoint, "tail_page", page))
        if slot is not None and checkpoint.slot is None:
            slot.rename(Holder(UnitState.CACHED, checkpoint.name))
            checkpoint.slot = slot
        elif slot is not None:
            slot.close()

    def _weigh(self, checkpoint: Checkpoint, ancestors: Sequence[Checkpoint]) -> None:
        """Older checkpoints on the new one's own path that no other conversation stands on give way first; so do
        endpoints and anchors by nature.

        An endpoint is worth keeping only for clients that echo the answer exactly, an anchor only for forks; being used
        proves either of them.
        """
        if checkpoint.kind in (CheckpointKind.PRIVATE_ENDPOINT, CheckpointKind.PRIVATE_LONG_ANCHOR):
            checkpoint.is_superseded = checkpoint.uses == 0
        if checkpoint.kind is CheckpointKind.PRIVATE_TURN_CLOSURE:
            for ancestor in ancestors:
                self._supersede(ancestor, ancestor.is_one_lines)
        checkpoint.benefit_tokens = checkpoint.frontier_tokens - self._tiers.surviving_ancestor_tokens(checkpoint)

    def _supersede(self, checkpoint: Checkpoint, is_superseded: bool = True) -> None:
        if checkpoint.is_superseded is not is_superseded:
            checkpoint.is_superseded = is_superseded
            self._tiers.store.place(checkpoint)

    def _ancestors(self, checkpoint: Checkpoint, tokens: Tokens) -> list[Checkpoint]:
        """Checkpoints on the path down to this one, live or lost, deepest first, itself left out."""
        nodes = [checkpoint.tree.root, *checkpoint.node.path()]
        on_path = checkpoint.tree.checkpoints_on(nodes, tokens, checkpoint.frontier_tokens)
        return [found for found in on_path if found is not checkpoint]
