"""The context cache: match a prompt, admit a request, capture checkpoints, and give everything back.

The cache decides and returns `Copy` records; the engine runs them and confirms. Nothing is visible before its bytes
are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cache.leases import CaptureTicket, Match, RequestLease
from cache.matching import Found, find_checkpoint, find_pages
from cache.pages import Page
from cache.pools import Holder, Lease, Pool, UnitState
from cache.retention import Retention
from cache.stats import CacheStats
from cache.tree import Tokens
from cache.types import (
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


class ContextCache:
    """All that is remembered on the device. Mutable: only the engine loop's task may touch it."""

    def __init__(self, options: CacheOptions, stats: CacheStats | None = None) -> None:
        """`stats` are those of a former cache, to go on counting."""
        self.options = options
        self.pages = Pool("device_kv_pages", options.kv_pages)
        self.slots = Pool("device_state_slots", options.state_slots if options.has_state else 0)
        self.stats = stats or CacheStats()
        self.retention = Retention(options, self.stats)
        self._leases: dict[str, RequestLease] = {}
        self._matches: dict[str, Match] = {}

    # -- a request's way in

    def match(self, request_id: str, namespace: str, tokens: Tokens) -> Match:
        """Find and pin the longest prefix that can be resumed; at least one token is always left to compute.

        Raises ValueError when the request holds a match or a lease already.
        """
        return self._open_match(request_id, namespace, tokens, self._find(namespace, tokens))

    def miss(self, request_id: str, namespace: str, tokens: Tokens) -> Match:
        """A match that reuses nothing and pins nothing, for a request that what it could reuse leaves no room for."""
        return self._open_match(request_id, namespace, tokens, Found())

    def _open_match(self, request_id: str, namespace: str, tokens: Tokens, found: Found) -> Match:
        if request_id in self._leases or request_id in self._matches:
            raise ValueError(f"request {request_id!r} holds a match or a lease already; release it first")
        match = Match(
            request_id=request_id,
            namespace=namespace,
            tokens=tokens,
            cached_tokens=found.cached_tokens,
            path=found.path,
            pages=found.pages,
            tail=found.tail,
            checkpoint=found.checkpoint if self.options.has_state else None,
            nearest=found.checkpoint,
            remembered_tokens=found.remembered_tokens,
        )
        for page in match.held_pages:
            page.pin(request_id)
        if match.checkpoint is not None:
            match.checkpoint.pins += 1
        self._matches[request_id] = match
        return match

    def release(self, match: Match) -> None:
        """Let go of what a match pinned. Harmless when it was admitted or released before."""
        if not match.is_open:
            return
        match.is_open = False
        del self._matches[match.request_id]
        for page in match.held_pages:
            page.unpin(match.request_id)
        if match.checkpoint is not None:
            self.retention.store.unpin(match.checkpoint)

    def admit(
        self,
        match: Match,
        reserve_tokens: int,
        wanted: Sequence[Frontier],
        now: float,
        *,
        is_first: bool = True,
    ) -> RequestLease | None:
        """Turn a match into a lease on pages for `reserve_tokens` tokens and a state slot, evicting what must give way.

        Returns None, with the match released and nothing evicted, when running requests hold too much; then wait. A
        request that was suspended comes a second time, and what it finds then does not count as reuse.
        """
        if not match.is_open:
            raise ValueError(f"the match of request {match.request_id!r} is closed")
        new_pages = max(self.options.pages_of(reserve_tokens) - len(match.pages), 1 if match.tail else 0)
        if not self._has_room(new_pages, slots=1 if self.options.has_state else 0):
            self.release(match)
            return None
        if match.nearest is not None and match.nearest in self.retention.store:
            self.retention.touch(match.nearest, match.tokens, now)
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
            origin=match.nearest,
            wanted=[f for f in wanted if match.cached_tokens < f.tokens <= len(match.tokens)],
        )
        match.is_open = False
        del self._matches[match.request_id]
        self._leases[lease.request_id] = lease
        if is_first:
            self.stats.selections[match.path] += 1
            self.stats.reused_tokens += match.cached_tokens
        if not lease.restore:
            self.confirm_restore(lease)
        return lease

    def confirm_restore(self, lease: RequestLease) -> None:
        """The copies of `lease.restore` have run, or will run before anything else is written: let go of their
        sources."""
        lease.restore = ()
        for page in lease.restore_sources:
            page.unpin(lease.request_id)
        lease.restore_sources = ()
        if lease.restore_checkpoint is not None:
            self.retention.store.unpin(lease.restore_checkpoint)
            lease.restore_checkpoint = None

    def grow(self, lease: RequestLease, total_tokens: int) -> bool:
        """Make room for `total_tokens` tokens in all. False, with nothing taken, when running requests hold too
        much."""
        missing = self.options.pages_of(total_tokens) - len(lease.pages)
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
            if frontier.kind is CheckpointKind.PRIVATE_TURN_CLOSURE and not self.slots.free:
                self.retention.expect_turn(lease.namespace, lease.tokens[: frontier.tokens])
            reason = self._why_no_slot(frontier.kind)
            slot = self._take_slot(holder) if reason is None else None
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
        self.retention.publish(
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

    def distrust(self, lease: RequestLease) -> None:
        """What this request was resumed from may be broken: drop it, so that a retry does not fail on it again."""
        checkpoint, lease.origin = lease.origin, None
        if checkpoint is not None and checkpoint.pins == 0 and checkpoint in self.retention.store:
            self.retention.drop(checkpoint)
            self.stats.distrusted += 1

    # -- looking in

    def fits_alone(self, total_tokens: int) -> bool:
        """Whether a request of this size can ever run."""
        return self.options.pages_of(total_tokens) <= self.pages.capacity

    def pending_frontier(self, namespace: str, tokens: Tokens) -> int:
        """The longest prefix of `tokens` that a running request is about to publish; 0 for none."""
        best = 0
        for lease in self._leases.values():
            if lease.namespace != namespace:
                continue
            for frontier in lease.wanted:
                size = frontier.tokens
                if not best < size < len(tokens) or lease.tokens[size - 1] != tokens[size - 1]:
                    continue
                if lease.tokens[:size] == tokens[:size]:
                    best = size
        return best

    def report(self, match: Match, wanted: Sequence[Frontier]) -> ReuseReport:
        """What the request reuses and why the rest, up to its own last frontier, is computed."""
        reusable = max((f.tokens for f in wanted if f.tokens < len(match.tokens)), default=len(match.tokens) - 1)
        missing = max(reusable - match.cached_tokens, 0)
        no_checkpoint = min(max(match.remembered_tokens - match.cached_tokens, 0), missing)
        lost = {"no_checkpoint": no_checkpoint, "cold": missing - no_checkpoint}
        if not self.options.prefix_reuse:
            lost = {"bypass": missing}
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
        for checkpoint in list(self.retention.store):
            if checkpoint.pins == 0:
                self.retention.drop(checkpoint)
                dropped += 1
        return dropped

    @property
    def leases(self) -> Iterable[RequestLease]:
        return self._leases.values()

    @property
    def matches(self) -> Iterable[Match]:
        return self._matches.values()

    # -- inside

    def _find(self, namespace: str, tokens: Tokens) -> Found:
        tree = self.retention.trees.get(namespace)
        limit = len(tokens) - 1
        if tree is None or limit < 1 or not self.options.prefix_reuse:
            return Found()
        return (find_checkpoint if self.options.has_state else find_pages)(tree, tokens, limit)

    def _why_not(self, lease: RequestLease, frontier: Frontier) -> SkipReason | None:
        if not self.options.prefix_reuse:
            return SkipReason.REUSE_OFF
        existing = self.retention.existing(lease.namespace, lease.tokens[: frontier.tokens])
        return SkipReason.ALREADY_CACHED if existing is not None else None

    def _why_no_slot(self, kind: CheckpointKind) -> SkipReason | None:
        if self.slots.free:
            return None
        victim = self.retention.store.least_valuable()
        if victim is None:
            return SkipReason.SLOTS_PINNED
        is_worth_more = kind is CheckpointKind.PRIVATE_LONG_ANCHOR and not victim.superseded
        return SkipReason.SLOTS_WORTH_MORE if is_worth_more else None

    def _has_room(self, pages: int, slots: int) -> bool:
        if self.pages.free + self.pages.counts().cached < pages:
            return False
        return slots == 0 or self.slots.free > 0 or self.retention.store.least_valuable() is not None

    def _take_slot(self, holder: Holder) -> Lease:
        if not self.slots.free:
            self.retention.give_way()
        return self.slots.lease(holder, 1)

    def _take_pages(self, count: int, request_id: str) -> list[Page]:
        give_way = self.retention.give_way if self.options.has_state else self.retention.give_way_by_a_page
        while self.pages.free < count and give_way():
            pass
        return [Page(self.pages, request_id) for _ in range(count)]

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
            self.retention.publish(lease, tokens[:computed_tokens], kind, slot, now)
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
        source = UnitHandle(Tier.DEVICE, match.tail[0].lease.units)
        copies.append(Copy(CopyObject.KV_PAGE, source, UnitHandle(Tier.DEVICE, fresh[0].lease.units)))
    if slot is not None and match.checkpoint is not None and match.checkpoint.slot is not None:
        source = UnitHandle(Tier.DEVICE, match.checkpoint.slot.units)
        copies.append(Copy(CopyObject.STATE, source, UnitHandle(Tier.DEVICE, slot.units)))
    return tuple(copies)
