"""The context cache: match a prompt, admit a request, capture checkpoints, and give everything back.

The cache decides and returns `Copy` records; the engine runs them and confirms. Nothing is visible before its bytes
are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from cache.checkpoints import Checkpoint
from cache.costs import Costs
from cache.demotion import Demotion, Demotions
from cache.faults import Fault, Faults
from cache.leases import CaptureTicket, Match, RequestLease, copies_of, slots_in_use
from cache.losses import report
from cache.matching import Found, find_checkpoint, find_pages, host_tokens
from cache.pools import Holder, Lease, Pool, UnitState
from cache.retention import Retention
from cache.stats import CacheStats
from cache.tiers import Tiers
from cache.tree import Tokens
from cache.types import CacheOptions, CheckpointKind, Frontier, LossReason, ReuseReport, SkipReason, Tier
from cache.upkeep import ResetCounts, quarantine, quarantine_pages, reset


class ContextCache:
    """All that is remembered, on the device and in host memory. Mutable: only the engine loop's task may touch it."""

    def __init__(
        self,
        options: CacheOptions,
        stats: CacheStats | None = None,
        faults: Faults | None = None,
        on_reuse: Callable[[RequestLease], None] = lambda _lease: None,
    ) -> None:
        """`stats` are those of a former cache, to go on counting; `on_reuse` is told of each lease whose reuse counts,
        once it is sure."""
        self.options = options
        self.stats = stats or CacheStats()
        self.faults = faults or Faults()
        self.costs = Costs()
        self.tiers = Tiers(options, self.stats, self.faults)
        self._leases: dict[str, RequestLease] = {}
        self._matches: dict[str, Match] = {}
        self.retention = Retention(self.tiers, self._leases)
        self.demotions = Demotions(self.tiers)
        self._on_reuse = on_reuse

    @property
    def pages(self) -> Pool:
        """KV pages on the device."""
        return self.tiers.pages

    @property
    def slots(self) -> Pool:
        """State slots on the device."""
        return self.tiers.slots

    @property
    def host(self) -> Pool:
        """Units of host memory."""
        return self.tiers.host

    # -- a request's way in

    def match(self, request_id: str, namespace: str, tokens: Tokens) -> Match:
        """Find and pin the prefix from which the prompt is computed soonest; one token at least is left to compute.
        Raises ValueError when the request holds a match or a lease already."""
        return self._open_match(request_id, namespace, tokens, self._find(namespace, tokens), is_chosen=True)

    def miss(self, request_id: str, namespace: str, tokens: Tokens) -> Match:
        """A match that reuses nothing and pins nothing, for a request that what it could reuse leaves no room for."""
        known = self._find(namespace, tokens).known
        return self._open_match(request_id, namespace, tokens, Found(known=known), is_chosen=False)

    def release(self, match: Match) -> None:
        """Let go of what a match pinned. Harmless when it was admitted or released before."""
        if not match.is_open:
            return
        match.is_open = False
        del self._matches[match.request_id]
        for page in match.held_pages:
            page.unpin(match.holder)
        if match.checkpoint is not None:
            self.tiers.unpin(match.checkpoint)

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

        Returns None, with the match released and nothing evicted, when running requests hold too much; then wait.
        A request that was suspended comes a second time, and what it finds then does not count as reuse.
        """
        if not match.is_open:
            raise ValueError(f"the match of request {match.request_id!r} is closed")
        self.tiers.now = now
        own = next((i for i, page in enumerate(match.pages) if page.tier is not Tier.DEVICE), len(match.pages))
        new_pages = max(self.options.pages_of(reserve_tokens) - own, 1 if match.tail else 0)
        if not self.tiers.has_room(new_pages, slots=1 if self.options.has_state else 0):
            self.release(match)
            return None
        found = self.report(match, wanted)
        if is_first:
            self.retention.compare(match)
        self.retention.learn(match, now)
        slot = self.tiers.take_slot(match.holder, match.namespace) if self.options.has_state else None
        fresh = self.tiers.take_pages(new_pages, match.holder, match.namespace)
        if fresh is None:
            if slot is not None:
                slot.close()
            self.release(match)
            return None
        restore, resume = copies_of(match, slot, fresh, own)
        far = [page for page in match.held_pages if page.tier is not Tier.DEVICE]
        lease = RequestLease(
            request_id=match.request_id,
            namespace=match.namespace,
            tokens=match.tokens,
            cached_tokens=match.cached_tokens,
            path=match.path,
            holder=match.holder,
            report=found,
            pages=[*match.pages[:own], *fresh],
            slot=slot,
            restore=restore,
            resume=resume,
            restore_sources=tuple(far),
            resume_sources=(match.tail[0],) if match.tail and match.tail[0].tier is Tier.DEVICE else (),
            pinned=match.checkpoint,
            origin=match.nearest,
            wanted=[f for f in wanted if self.options.prefix_reuse and match.cached_tokens < f.tokens],
            is_first=is_first,
        )
        match.is_open = False
        del self._matches[match.request_id]
        self._leases[lease.request_id] = lease
        self.retention.expectation.admitted()
        self.stats.restores += 1 if restore else 0
        if not restore:
            self._begin(lease)
        if not restore and not resume:
            self.confirm_resume(lease)
        return lease

    def confirm_restore(self, lease: RequestLease, now: float) -> None:
        """The copies of `lease.restore` are done: let go of their sources."""
        self.tiers.now = now
        lease.restore = ()
        self._begin(lease)
        if not lease.resume:
            self.confirm_resume(lease)

    def fail_restore(self, lease: RequestLease, now: float) -> None:
        """A copy of `lease.restore` failed: close the lease, and keep what it read from nobody else's way."""
        if not lease.is_open:
            return
        self.stats.restore_failures += 1
        source, pages = lease.origin, lease.restore_sources
        self._close(lease, lease.tokens, 0, CheckpointKind.PRIVATE_LONG_ANCHOR, now)
        if self.options.has_state:
            self._quarantine(lease, source)
        else:
            quarantine_pages(self.tiers, pages)

    def confirm_resume(self, lease: RequestLease) -> None:
        """The copies of `lease.resume` have run, or will run before anything else is written: let go of their
        sources."""
        lease.resume = ()
        for page in lease.resume_sources:
            page.unpin(lease.holder)
        lease.resume_sources = ()
        if lease.pinned is not None:
            self.tiers.unpin(lease.pinned)
            lease.pinned = None

    def grow(self, lease: RequestLease, total_tokens: int) -> bool:
        """Make room for so many tokens in all. False, with nothing taken, when running requests hold too much."""
        missing = self.options.pages_of(total_tokens) - len(lease.pages)
        if missing <= 0:
            return True
        if not self.tiers.has_room(missing, slots=0):
            return False
        pages = self.tiers.take_pages(missing, lease.holder, lease.namespace)
        lease.pages.extend(pages or ())
        return pages is not None

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
            slot = self.tiers.take_slot(holder, lease.namespace) if reason is None else None
        if reason is not None:
            self.stats.publish_skipped[reason] += 1
            if reason is SkipReason.ALREADY_CACHED:
                self.retention.again(lease, lease.tokens[: frontier.tokens])
            if reason.is_loss and frontier.kind is not CheckpointKind.PRIVATE_LONG_ANCHOR:
                tokens = lease.tokens[: frontier.tokens]
                is_crowded = reason is SkipReason.SLOTS_PINNED and self._every_slot_is_in_use()
                self.retention.miss_out(lease, tokens, frontier.kind, LossReason.PUBLISH_SKIPPED, gives_way=is_crowded)
            return reason
        lease.tickets.append(ticket := CaptureTicket(lease, frontier, slot))
        return ticket

    def publish(self, ticket: CaptureTicket, now: float) -> None:
        """The bytes of the capture are there: make the checkpoint visible."""
        if not ticket.is_open:
            return
        self.tiers.now = now
        self._close_ticket(ticket)
        lease, frontier = ticket.lease, ticket.frontier
        lease.published.append(frontier.tokens)
        self.retention.publish(lease, lease.tokens[: frontier.tokens], frontier.kind, ticket.slot, now)

    def discard(self, ticket: CaptureTicket) -> None:
        """The capture did not happen: give its destination back. Harmless when it was published or discarded before."""
        if not ticket.is_open:
            return
        self._close_ticket(ticket)
        if ticket.slot is not None:
            ticket.slot.close()

    def plan_demotions(self, now: float, most_bytes: int) -> list[Demotion]:
        """Checkpoints to copy to host memory in the background, because they are next to leave the device."""
        self.tiers.now = now
        return self.demotions.plan(most_bytes)

    def confirm_demotion(self, demotion: Demotion, now: float) -> None:
        """Its bytes are in host memory. Harmless when it was confirmed or cancelled before."""
        self.tiers.now = now
        self.demotions.confirm(demotion)

    def cancel_demotion(self, demotion: Demotion) -> None:
        """Its copy failed, or will not run. Harmless when it was confirmed or cancelled before."""
        self.demotions.cancel(demotion)

    # -- a request's way out

    def finish(self, lease: RequestLease, tokens: Tokens, computed_tokens: int, now: float) -> None:
        """The request is done: what it computed becomes an endpoint checkpoint, without a copy. Closing twice is
        harmless."""
        self._close(lease, tokens, computed_tokens, CheckpointKind.PRIVATE_ENDPOINT, now)

    def abort(self, lease: RequestLease, tokens: Tokens, computed_tokens: int, now: float) -> None:
        """The request leaves early: what it computed stays for a retry. 0 computed tokens leave nothing behind."""
        self._close(lease, tokens, computed_tokens, CheckpointKind.PRIVATE_LONG_ANCHOR, now)

    def distrust(self, lease: RequestLease, *, own: bool = False) -> None:
        """Take out what this request was resumed from, and with `own` what it published: a retry would fail on it."""
        suspects = [self.retention.find(lease.namespace, lease.tokens[:size]) for size in lease.published if own]
        for checkpoint in (lease.origin, *suspects):
            self._quarantine(lease, checkpoint)

    # -- looking in

    def fits_alone(self, total_tokens: int) -> bool:
        """Whether a request of this size can ever run."""
        return self.options.pages_of(total_tokens) <= self.pages.capacity

    def pending_frontier(self, namespace: str, tokens: Tokens) -> int:
        """The longest prefix of `tokens` that a running request is about to publish; 0 for none."""
        return max((lease.about_to_publish(tokens) for lease in self._running(namespace)), default=0)

    def report(self, match: Match, wanted: Sequence[Frontier]) -> ReuseReport:
        """What the request reuses and why the rest, up to its own last frontier, is computed."""
        expected = self.retention.expectation.of(match, self.costs)
        return report(match, wanted, expected, has_reuse=self.options.prefix_reuse)

    def reset(self, tiers: Iterable[Tier] = (Tier.DEVICE, Tier.HOST)) -> dict[Tier, ResetCounts]:
        """Drop from these tiers every checkpoint that nobody uses at this moment."""
        self.retention.clear()
        return reset(self.tiers, tiers)

    @property
    def leases(self) -> Iterable[RequestLease]:
        return self._leases.values()

    @property
    def matches(self) -> Iterable[Match]:
        return self._matches.values()

    # -- inside

    def _find(self, namespace: str, tokens: Tokens) -> Found:
        tree = self.tiers.ghosts.trees.get(namespace)
        limit = len(tokens) - 1
        if limit < 1 or not self.options.prefix_reuse:
            return Found()
        find = find_checkpoint if self.options.has_state else find_pages
        found = Found() if tree is None else find(tree, tokens, limit, self.options, self.costs)
        return found.parting_at(max((each.parting_tokens(tokens) for each in self._running(namespace)), default=0))

    def _running(self, namespace: str) -> Iterable[RequestLease]:
        return (lease for lease in self._leases.values() if lease.namespace == namespace)

    def _open_match(self, request_id: str, namespace: str, tokens: Tokens, found: Found, *, is_chosen: bool) -> Match:
        if request_id in self._matches or request_id in self._leases:
            raise ValueError(f"request {request_id!r} holds a match or a lease already")
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
            host_tokens=host_tokens(found, self.options),
            known=found.known,
            holder=Holder(UnitState.PINNED, request_id),
            is_chosen=is_chosen,
        )
        for page in match.held_pages:
            page.pin(match.holder)
        if match.checkpoint is not None:
            self.tiers.store.pin(match.checkpoint)
        self._matches[request_id] = match
        return match

    def _begin(self, lease: RequestLease) -> None:
        """What it reuses is there, or needs no copy from host memory: only now is it sure to be reused."""
        if lease.is_first:
            self.stats.count_reuse(lease.report)
            self._on_reuse(lease)
        self._end_restore(lease)

    def _end_restore(self, lease: RequestLease) -> None:
        for page in lease.restore_sources:
            page.unpin(lease.holder)
        lease.restore_sources = ()

    def _why_not(self, lease: RequestLease, frontier: Frontier) -> SkipReason | None:
        if not self.options.prefix_reuse:
            return SkipReason.REUSE_OFF
        if Fault.REFUSE_PUBLISH in self.faults:
            return SkipReason.FAULT
        is_cached = self.retention.is_cached(lease.namespace, lease.tokens[: frontier.tokens])
        return SkipReason.ALREADY_CACHED if is_cached else None

    def _why_no_slot(self, kind: CheckpointKind) -> SkipReason | None:
        if self.slots.free:
            return None
        if not len(self.tiers.store.slots):
            return SkipReason.SLOTS_PINNED
        return SkipReason.SLOTS_WORTH_MORE if self.tiers.is_anchor_worth_less(kind) else None

    def _every_slot_is_in_use(self) -> bool:
        """Or else slots are with nobody."""
        copied = [demotion.checkpoint for demotion in self.demotions.under_way]
        return slots_in_use(self._leases.values(), self._matches.values(), copied) >= self.slots.capacity

    def _quarantine(self, lease: RequestLease, checkpoint: Checkpoint | None) -> None:
        """Nobody is to find it any more, but why it is gone is remembered, even while others still read from it."""
        if quarantine(self.tiers, checkpoint, LossReason.RESTORE_FAILED) and checkpoint is not None:
            tokens = lease.tokens[: checkpoint.frontier_tokens]
            self.retention.miss_out(lease, tokens, checkpoint.kind, LossReason.RESTORE_FAILED)

    def _close_ticket(self, ticket: CaptureTicket) -> None:
        ticket.is_open = False
        ticket.lease.tickets.remove(ticket)

    def _close(
        self, lease: RequestLease, tokens: Tokens, computed_tokens: int, kind: CheckpointKind, now: float
    ) -> None:
        if not lease.is_open:
            return
        self.tiers.now = now
        lease.is_open = False
        for ticket in tuple(lease.tickets):
            self.discard(ticket)
        is_new = lease.cached_tokens < computed_tokens <= len(tokens)
        self._end_restore(lease)
        self.confirm_resume(lease)
        if is_new and self.options.prefix_reuse:
            slot, lease.slot = lease.slot, None
            self.retention.publish(lease, tokens[:computed_tokens], kind, slot, now)
        for page in lease.pages:
            page.unpin(lease.holder)
        lease.pages.clear()
        if lease.slot is not None:
            lease.slot.close()
            lease.slot = None
        del self._leases[lease.request_id]
