"""The context cache: match a prompt, admit a request, capture checkpoints, and give everything back.

The cache decides and returns `Copy` records; the engine runs them and confirms. Nothing is visible before its bytes
are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from cache.checkpoints import Checkpoint, CheckpointStore
from cache.leases import CaptureTicket, Match, RequestLease
from cache.pages import Page
from cache.pools import Holder, Lease, Pool, UnitState
from cache.tree import PrefixTree, Tokens
from cache.types import (
    ROOT_PATH,
    CacheOptions,
    CheckpointKind,
    Copy,
    CopyObject,
    Frontier,
    ReuseReport,
    SkipReason,
    Tier,
    UnitHandle,
)


@dataclass(slots=True)
class CacheStats:
    """Counters since the start; always on. Mutable: only the engine loop's task may touch it."""

    selections: Counter[str] = field(default_factory=Counter)
    """Admitted requests by reuse path."""
    reused_tokens: int = 0
    evictions: Counter[CheckpointKind] = field(default_factory=Counter)
    """Checkpoints that gave way, by kind."""
    publish_skipped: Counter[SkipReason] = field(default_factory=Counter)
    published: Counter[CheckpointKind] = field(default_factory=Counter)


class ContextCache:
    """All that is remembered on the device. Mutable: only the engine loop's task may touch it."""

    def __init__(self, options: CacheOptions) -> None:
        self.options = options
        self.pages = Pool("device_kv_pages", options.kv_pages)
        self.slots = Pool("device_state_slots", options.state_slots if options.has_state else 0)
        self.store = CheckpointStore()
        self.stats = CacheStats()
        self._trees: dict[str, PrefixTree] = {}
        self._leases: dict[str, RequestLease] = {}
        self._matches: dict[str, Match] = {}

    # -- a request's way in

    def match(self, request_id: str, namespace: str, tokens: Tokens) -> Match:
        """Find and pin the longest prefix that can be resumed; at least one token is always left to compute.

        Raises ValueError when the request holds a match or a lease already.
        """
        if request_id in self._leases or request_id in self._matches:
            raise ValueError(f"request {request_id!r} holds a match or a lease already; release it first")
        tree = self._trees.get(namespace)
        limit = len(tokens) - 1
        if tree is None or limit < 1 or not self.options.prefix_reuse:
            found = Match(request_id, namespace, tokens, 0, ROOT_PATH, (), None, None, 0)
        elif self.options.has_state:
            found = self._match_checkpoint(request_id, namespace, tree, tokens, limit)
        else:
            found = self._match_pages(request_id, namespace, tree, tokens, limit)
        for page in (*found.pages, *((found.tail[0],) if found.tail else ())):
            page.pin(request_id)
        if found.checkpoint is not None:
            found.checkpoint.pins += 1
        self._matches[request_id] = found
        return found

    def release(self, match: Match) -> None:
        """Let go of what a match pinned. Harmless when it was admitted or released before."""
        if not match.is_open:
            return
        match.is_open = False
        del self._matches[match.request_id]
        for page in (*match.pages, *((match.tail[0],) if match.tail else ())):
            page.unpin(match.request_id)
        if match.checkpoint is not None:
            self.store.unpin(match.checkpoint)

    def admit(self, match: Match, reserve_tokens: int, wanted: Sequence[Frontier], now: float) -> RequestLease | None:
        """Turn a match into a lease on pages for `reserve_tokens` tokens and a state slot, evicting what must give way.

        Returns None, with the match released and nothing evicted, when running requests hold too much; then wait.
        """
        if not match.is_open:
            raise ValueError(f"the match of request {match.request_id!r} is closed")
        new_pages = max(self._pages_for(reserve_tokens) - len(match.pages), 1 if match.tail else 0)
        if not self._has_room(new_pages, slots=1 if self.options.has_state else 0):
            self.release(match)
            return None
        slot = self._take_slot(Holder(UnitState.PINNED, match.request_id)) if self.options.has_state else None
        fresh = self._take_pages(new_pages, match.request_id)
        lease = RequestLease(
            request_id=match.request_id,
            namespace=match.namespace,
            tokens=match.tokens,
            cached_tokens=match.cached_tokens,
            path=match.path,
            pages=[*match.pages, *fresh],
            slot=slot,
            restore=_restore_copies(match, slot, fresh),
            restore_sources=(match.tail[0],) if match.tail else (),
            restore_checkpoint=match.checkpoint,
            wanted=[f for f in wanted if match.cached_tokens < f.tokens <= len(match.tokens)],
        )
        if match.checkpoint is not None:
            self._touch(match.checkpoint, match.tokens, now)
        match.is_open = False
        del self._matches[match.request_id]
        self._leases[lease.request_id] = lease
        self.stats.selections[match.path] += 1
        self.stats.reused_tokens += match.cached_tokens
        if not lease.restore:
            self.confirm_restore(lease)
        return lease

    def confirm_restore(self, lease: RequestLease) -> None:
        """The copies of `lease.restore` have run: let go of their sources."""
        lease.restore = ()
        for page in lease.restore_sources:
            page.unpin(lease.request_id)
        lease.restore_sources = ()
        if lease.restore_checkpoint is not None:
            self.store.unpin(lease.restore_checkpoint)
            lease.restore_checkpoint = None

    def grow(self, lease: RequestLease, total_tokens: int) -> bool:
        """Make room for `total_tokens` tokens in all. False, with nothing taken, when running requests hold too
        much."""
        missing = self._pages_for(total_tokens) - len(lease.pages)
        if missing <= 0:
            return True
        if not self._has_room(missing, slots=0):
            return False
        lease.pages.extend(self._take_pages(missing, lease.request_id))
        return True

    # -- checkpoints

    def capture(self, lease: RequestLease, frontier: Frontier) -> CaptureTicket | SkipReason:
        """Reserve a destination for the state at `frontier`, which the next step will compute."""
        lease.wanted = [f for f in lease.wanted if f.tokens != frontier.tokens]
        reason = self._why_not(lease, frontier)
        slot: Lease | None = None
        if reason is None and self.options.has_state:
            holder = Holder(UnitState.IN_FLIGHT, f"capture:{lease.request_id}")
            if self.slots.free or self.store.least_valuable() is not None:
                slot = self._take_slot(holder)
            else:
                reason = SkipReason.SLOTS_PINNED
        if reason is not None:
            self.stats.publish_skipped[reason] += 1
            return reason
        ticket = CaptureTicket(lease, frontier, slot)
        lease.tickets.append(ticket)
        return ticket

    def publish(self, ticket: CaptureTicket, now: float) -> None:
        """The bytes of the capture are there: make the checkpoint visible."""
        if not ticket.is_open:
            return
        self._close_ticket(ticket)
        self._publish(
            ticket.lease, ticket.lease.tokens[: ticket.frontier.tokens], ticket.frontier.kind, ticket.slot, now
        )

    def discard(self, ticket: CaptureTicket) -> None:
        """The capture did not happen: give its destination back. Harmless when it was published or discarded before."""
        if not ticket.is_open:
            return
        self._close_ticket(ticket)
        if ticket.slot is not None:
            ticket.slot.close()

    # -- a request's way out

    def finish(self, lease: RequestLease, tokens: Tokens, computed_tokens: int, now: float) -> None:
        """The request is done: what it computed becomes an endpoint checkpoint, without a copy. Closing twice is
        harmless."""
        self._close(lease, tokens, computed_tokens, CheckpointKind.PRIVATE_ENDPOINT, now)

    def abort(self, lease: RequestLease, tokens: Tokens, computed_tokens: int, now: float) -> None:
        """The request leaves early: what it computed stays for a retry. 0 computed tokens leave nothing behind."""
        self._close(lease, tokens, computed_tokens, CheckpointKind.PRIVATE_LONG_ANCHOR, now)

    # -- looking in

    def fits_alone(self, total_tokens: int) -> bool:
        """Whether a request of this size can ever run."""
        return self._pages_for(total_tokens) <= self.pages.capacity

    def pending_frontier(self, namespace: str, tokens: Tokens) -> int:
        """The longest prefix of `tokens` that a running request is about to publish; 0 for none."""
        best = 0
        for lease in self._leases.values():
            if lease.namespace != namespace:
                continue
            for frontier in lease.wanted:
                size = frontier.tokens
                if best < size < len(tokens) and lease.tokens[:size] == tokens[:size]:
                    best = size
        return best

    def report(self, match: Match, wanted: Sequence[Frontier]) -> ReuseReport:
        """What the request reuses and why the rest, up to its own last frontier, is computed."""
        reusable = max((f.tokens for f in wanted if f.tokens < len(match.tokens)), default=len(match.tokens) - 1)
        missing = max(reusable - match.cached_tokens, 0)
        no_checkpoint = min(max(match.remembered_tokens - match.cached_tokens, 0), missing)
        lost = {"no_checkpoint": no_checkpoint, "cold": missing - no_checkpoint}
        return ReuseReport(
            path=match.path,
            prompt_tokens=len(match.tokens),
            cached_tokens=match.cached_tokens,
            achievable_tokens=match.cached_tokens + no_checkpoint,
            source={Tier.DEVICE: match.cached_tokens, Tier.HOST: 0, Tier.DISK: 0},
            lost={reason: tokens for reason, tokens in lost.items() if tokens},
        )

    def reset(self) -> int:
        """Drop every checkpoint that nobody uses at this moment; returns how many."""
        dropped = 0
        for checkpoint in list(self.store):
            if checkpoint.pins == 0:
                self._drop(checkpoint)
                dropped += 1
        return dropped

    @property
    def leases(self) -> Iterable[RequestLease]:
        return self._leases.values()

    @property
    def matches(self) -> Iterable[Match]:
        return self._matches.values()

    @property
    def trees(self) -> dict[str, PrefixTree]:
        return self._trees

    # -- inside

    def _match_checkpoint(self, request_id: str, namespace: str, tree: PrefixTree, tokens: Tokens, limit: int) -> Match:
        nodes = tree.walk(tokens, limit)
        remembered = nodes[-1].depth * self.options.page_size
        found = tree.deepest_checkpoint(nodes, tokens, limit)
        if found is None:
            return Match(request_id, namespace, tokens, 0, ROOT_PATH, (), None, None, remembered)
        pages = tuple(node.page for node in nodes[1 : found.node.depth + 1] if node.page is not None)
        tail = (found.tail_page, len(found.tail)) if found.tail_page is not None else None
        frontier = found.frontier_tokens
        return Match(request_id, namespace, tokens, frontier, found.kind, pages, tail, found, max(remembered, frontier))

    def _match_pages(self, request_id: str, namespace: str, tree: PrefixTree, tokens: Tokens, limit: int) -> Match:
        nodes = tree.walk(tokens, limit)
        pages = tuple(node.page for node in nodes if node.page is not None)
        tail = tree.longest_partial(nodes[-1], tokens, limit)
        cached = nodes[-1].depth * self.options.page_size + (tail[1] if tail else 0)
        nearest = tree.deepest_checkpoint(nodes, tokens, limit)
        if cached == 0:
            path: str = ROOT_PATH
        elif nearest is not None and nearest.frontier_tokens == cached:
            path = nearest.kind
        else:
            path = CheckpointKind.SHARED_BRANCH
        return Match(request_id, namespace, tokens, cached, path, pages, tail, nearest, cached)

    def _why_not(self, lease: RequestLease, frontier: Frontier) -> SkipReason | None:
        if not self.options.prefix_reuse:
            return SkipReason.REUSE_OFF
        existing = self._existing(lease.namespace, lease.tokens[: frontier.tokens])
        return SkipReason.ALREADY_CACHED if existing is not None else None

    def _existing(self, namespace: str, tokens: Tokens) -> Checkpoint | None:
        tree = self._trees.get(namespace)
        if tree is None:
            return None
        node = tree.walk(tokens, len(tokens))[-1]
        start = node.depth * self.options.page_size
        return node.checkpoints.get(tokens[start:]) if len(tokens) - start < self.options.page_size else None

    def _publish(
        self, lease: RequestLease, tokens: Tokens, kind: CheckpointKind, slot: Lease | None, now: float
    ) -> None:
        existing = self._existing(lease.namespace, tokens)
        if existing is not None:
            self.stats.publish_skipped[SkipReason.ALREADY_CACHED] += 1
            if slot is not None:
                slot.close()
            return
        size = self.options.page_size
        tree = self._trees.setdefault(lease.namespace, PrefixTree(size))
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
            owner=lease.request_id,
            now=now,
        )
        if slot is not None:
            slot.rename(Holder(UnitState.CACHED, checkpoint.name))
        tree.attach(node, tail, checkpoint)
        self.store.add(checkpoint)
        self.stats.published[kind] += 1
        self._supersede(checkpoint, tokens)

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
        size = self.options.page_size
        found: list[Checkpoint] = []
        for node in (*reversed(checkpoint.node.path()), checkpoint.tree.root):
            start = node.depth * size
            found.extend(
                other
                for tail, other in node.checkpoints.items()
                if other.frontier_tokens <= checkpoint.frontier_tokens and tokens[start : start + len(tail)] == tail
            )
        return found

    def _touch(self, checkpoint: Checkpoint, tokens: Tokens, now: float) -> None:
        """Mark it as used, and with it the shared prefixes that it stands on."""
        self.store.touch(checkpoint, now)
        for ancestor in self._ancestors(checkpoint, tokens):
            if ancestor.kind.is_shared and ancestor is not checkpoint:
                self.store.touch(ancestor, now)

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.options.page_size)

    def _has_room(self, pages: int, slots: int) -> bool:
        if self.pages.free + self.pages.counts().cached < pages:
            return False
        return slots == 0 or self.slots.free > 0 or self.store.least_valuable() is not None

    def _take_slot(self, holder: Holder) -> Lease:
        if not self.slots.free:
            victim = self.store.least_valuable()
            if victim is not None:
                self._evict(victim)
        return self.slots.lease(holder, 1)

    def _take_pages(self, count: int, request_id: str) -> list[Page]:
        while self.pages.free < count:
            victim = self.store.least_valuable()
            if victim is None:
                break
            if self.options.has_state:
                self._evict(victim)
            else:
                self._shorten(victim)
        return [Page(self.pages, request_id) for _ in range(count)]

    def _evict(self, checkpoint: Checkpoint) -> None:
        self.stats.evictions[checkpoint.kind] += 1
        self._drop(checkpoint)

    def _drop(self, checkpoint: Checkpoint) -> None:
        self.store.remove(checkpoint)
        if checkpoint.slot is not None:
            checkpoint.slot.close()
        checkpoint.tree.detach(checkpoint)
        if checkpoint.tail_page is not None:
            checkpoint.tail_page.unref()
        self._forget_empty_tree(checkpoint.namespace)

    def _shorten(self, checkpoint: Checkpoint) -> None:
        """Give up the last page only, which a model without recurrent states can: its KV can be cut anywhere."""
        node = checkpoint.node
        target = node if checkpoint.tail else node.parent
        is_alone = checkpoint.tail != () or (not node.children and len(node.checkpoints) == 1)
        if target is None or target.parent is None or () in target.checkpoints or not is_alone:
            self._evict(checkpoint)
            return
        tree, tail_page = checkpoint.tree, checkpoint.tail_page
        tree.attach(target, (), checkpoint)
        tree.detach(checkpoint)
        checkpoint.node, checkpoint.tail, checkpoint.tail_page = target, (), None
        if tail_page is not None:
            tail_page.unref()

    def _forget_empty_tree(self, namespace: str) -> None:
        tree = self._trees.get(namespace)
        if tree is not None and tree.root.is_bare:
            del self._trees[namespace]

    def _close_ticket(self, ticket: CaptureTicket) -> None:
        ticket.is_open = False
        ticket.lease.tickets.remove(ticket)

    def _close(
        self, lease: RequestLease, tokens: Tokens, computed_tokens: int, kind: CheckpointKind, now: float
    ) -> None:
        if not lease.is_open:
            return
        lease.is_open = False
        for ticket in tuple(lease.tickets):
            self.discard(ticket)
        is_new = lease.cached_tokens < computed_tokens <= len(tokens)
        self.confirm_restore(lease)
        if is_new and self.options.prefix_reuse:
            slot, lease.slot = lease.slot, None
            self._publish(lease, tokens[:computed_tokens], kind, slot, now)
        for page in lease.pages:
            page.unpin(lease.request_id)
        lease.pages.clear()
        if lease.slot is not None:
            lease.slot.close()
            lease.slot = None
        del self._leases[lease.request_id]


def _restore_copies(match: Match, slot: Lease | None, fresh: Sequence[Page]) -> tuple[Copy, ...]:
    copies: list[Copy] = []
    if match.tail is not None:
        source = UnitHandle(Tier.DEVICE, match.tail[0].unit)
        copies.append(Copy(CopyObject.KV_PAGE, source, UnitHandle(Tier.DEVICE, fresh[0].unit)))
    if slot is not None and match.checkpoint is not None and match.checkpoint.slot is not None:
        source = UnitHandle(Tier.DEVICE, match.checkpoint.slot.units[0])
        copies.append(Copy(CopyObject.STATE, source, UnitHandle(Tier.DEVICE, slot.units[0])))
    return tuple(copies)
