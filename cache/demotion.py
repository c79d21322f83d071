"""Copies to host memory ahead of eviction: reserve, copy, confirm, and only then is there a replica."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cache.checkpoints import Checkpoint, Line
from cache.pools import Holder, Lease, UnitState
from cache.replicas import Replica
from cache.tiers import Tiers
from cache.tree import Node
from cache.types import Copy, CopyObject, SkipReason, Tier, UnitHandle


@dataclass(slots=True, eq=False)
class Demotion:
    """One checkpoint's way to host memory. Mutable only in `is_open`.

    What it reads stays on the device, and what it writes is nobody else's, until it is confirmed or cancelled.
    """

    checkpoint: Checkpoint
    holder: Holder
    copies: tuple[Copy, ...]
    size_bytes: int
    base: Node
    """The deepest node of the path that host memory has already; it stays there."""
    pages: tuple[Replica, ...]
    """In host memory, of the nodes below `base`."""
    tail: Replica | None
    state: Lease | None
    device_pages: int
    """That stay on the device for it."""
    is_open: bool = True

    @property
    def written(self) -> tuple[Replica, ...]:
        """Every page that it writes."""
        return self.pages if self.tail is None else (*self.pages, self.tail)


class Demotions:
    """Those under way. Mutable: only the engine loop's task may touch it."""

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
        self._open: list[Demotion] = []
        self._number = 0

    @property
    def under_way(self) -> tuple[Demotion, ...]:
        return tuple(self._open)

    def plan(self, most_bytes: int) -> list[Demotion]:
        """Begin to copy those that are next to leave the device, so that leaving needs no copy; at least one, if any is
        wanted, then as long as `most_bytes` lasts."""
        planned: list[Demotion] = []
        refused: set[int] = set()
        while self._tiers.options.host_units and sum(d.size_bytes for d in planned) < most_bytes:
            candidate = self._next()
            demotion = None if candidate is None else self._begin(candidate)
            if demotion is not None:
                planned.append(demotion)
            elif candidate is None or not candidate.is_refused or candidate.number in refused:
                break
            else:
                refused.add(candidate.number)
        return planned

    def confirm(self, demotion: Demotion) -> None:
        """The bytes are there: the checkpoint has a replica in host memory. Harmless when it was closed before."""
        if not demotion.is_open:
            return
        checkpoint, tiers = demotion.checkpoint, self._tiers
        self._open.remove(demotion)
        demotion.is_open = False
        if checkpoint in tiers.store:
            checkpoint.tree.hold(checkpoint.node, Tier.HOST, demotion.pages, above=demotion.base.depth)
            tail = demotion.tail
            if tail is not None:
                tail.ref()
                checkpoint.tree.change_tail(checkpoint, lambda: setattr(checkpoint, "host_tail", tail))
            if demotion.state is not None:
                demotion.state.rename(Holder(UnitState.CACHED, checkpoint.name))
                checkpoint.host_state = demotion.state
                tiers.store.held[Tier.HOST].change(checkpoint.namespace, len(demotion.state))
            checkpoint.is_in_host = True
            tiers.stats.checkpoints_demoted += 1
        elif demotion.state is not None:
            tiers.close_host_state(demotion.state)
        self._let_go(demotion)

    def cancel(self, demotion: Demotion) -> None:
        """The copy failed or is not wanted: give everything back. Harmless when it was closed before."""
        if not demotion.is_open:
            return
        self._open.remove(demotion)
        demotion.is_open = False
        if demotion.state is not None:
            self._tiers.close_host_state(demotion.state)
        self._let_go(demotion)

    def _let_go(self, demotion: Demotion) -> None:
        for page in demotion.written:
            page.unpin(demotion.holder)
        checkpoint = demotion.checkpoint
        checkpoint.tree.let_go(demotion.base, Tier.HOST)
        self._tiers.copied_pages -= demotion.device_pages
        self._tiers.unpin(checkpoint)

    def _next(self) -> Checkpoint | None:
        """Who should have a copy in host memory now and has none."""
        tiers, store = self._tiers, self._tiers.store
        if tiers.options.has_state and tiers.slots.free < tiers.options.ready_checkpoints:
            at_hand = len(store.slots.ready) + len(self._open)
            found = self._next_in(store.slots, at_hand < tiers.options.ready_checkpoints)
            if found is not None:
                return found
        pages_at_hand = tiers.pages.free + store.pages.ready_weight
        if tiers.pages.free < tiers.pages.capacity // 8:
            found = self._next_in(store.pages, pages_at_hand < tiers.pages.capacity // 4)
            if found is not None:
                return found
        return self._next_for_vacant_room()

    def _next_for_vacant_room(self) -> Checkpoint | None:
        """While host memory has room that nothing fills, everything is copied ahead of need: one long prompt may push
        out more at once than is kept ready."""
        tiers = self._tiers
        if tiers.host.free <= (tiers.options.host_units_per_state if tiers.options.has_state else 0):
            return None
        line = tiers.store.slots if tiers.options.has_state else tiers.store.pages
        least = line.others.least(tiers.now)
        if not isinstance(least, Checkpoint):
            return None
        fits = tiers.has_host_room(self._units_of(least, _missing(least)), self._states_of(least))
        return least if fits else None

    def _next_in(self, line: Line, is_short: bool) -> Checkpoint | None:
        tiers = self._tiers
        ready = line.ready.least(tiers.now)
        if isinstance(ready, Checkpoint) and ready.is_refused and ready.is_whole_on_device and not ready.is_in_host:
            units = self._units_of(ready, _missing(ready))
            if tiers.has_host_room(units, self._states_of(ready)) or tiers.may_displace_in_host(ready, units):
                ready.is_refused = False
                tiers.store.place(ready)
                return ready
        other = line.others.least(tiers.now)
        if not isinstance(other, Checkpoint):
            return None
        is_overtaken = isinstance(ready, Checkpoint) and tiers.order(other) < tiers.order(ready)
        return other if is_short or is_overtaken else None

    def _states_of(self, checkpoint: Checkpoint) -> int:
        return 0 if checkpoint.slot is None else 1

    def _units_of(self, checkpoint: Checkpoint, missing: Sequence[Node]) -> int:
        """Units of host memory that its copy would take, `missing` being what host memory has not of its path."""
        pages = len(missing) + (1 if checkpoint.tail else 0)
        return pages + self._states_of(checkpoint) * self._tiers.options.host_units_per_state

    def _begin(self, checkpoint: Checkpoint) -> Demotion | None:
        """Reserve what the copy needs; None, and it is refused, when what is in host memory is worth more."""
        tiers, missing = self._tiers, _missing(checkpoint)
        being_copied = {id(node) for demotion in self._open for node in _missing(demotion.checkpoint)}
        if not being_copied.isdisjoint(map(id, missing)):
            return None  # A part of its path is on its way already: wait for that.
        base = checkpoint.node if not missing else missing[0].parent or checkpoint.tree.root
        tiers.store.pin(checkpoint)
        checkpoint.tree.hold(base, Tier.HOST, ())
        states = self._states_of(checkpoint)
        if not tiers.make_host_room(self._units_of(checkpoint, missing), states, checkpoint):
            checkpoint.tree.let_go(base, Tier.HOST)
            checkpoint.is_refused = True
            tiers.unpin(checkpoint)
            is_full = len(tiers.store.host) > 0
            tiers.stats.publish_skipped[SkipReason.HOST_WORTH_MORE if is_full else SkipReason.HOST_PINNED] += 1
            return None
        self._number += 1
        holder = Holder(UnitState.IN_FLIGHT, f"demotion-{self._number}")
        pages = [Replica(lease, Tier.HOST) for lease in tiers.host.singles(holder, len(missing))]
        tail = Replica(tiers.host.lease(holder, 1), Tier.HOST) if checkpoint.tail else None
        state = tiers.host.lease(holder, tiers.options.host_units_per_state) if states else None
        tiers.host_states += states
        tiers.stats.granted[tiers.host.name] += self._units_of(checkpoint, missing)
        tiers.copied_pages += checkpoint.device_pages
        copies = _copies(checkpoint, missing, pages, tail, state)
        demotion = Demotion(
            checkpoint=checkpoint,
            holder=holder,
            copies=copies,
            size_bytes=tiers.options.bytes_of(copies),
            base=base,
            pages=tuple(pages),
            tail=tail,
            state=state,
            device_pages=checkpoint.device_pages,
        )
        self._open.append(demotion)
        return demotion


def _missing(checkpoint: Checkpoint) -> list[Node]:
    """The nodes of its path that host memory does not have, the highest first."""
    nodes, node = list[Node](), checkpoint.node
    while node.parent is not None and node.host is None:
        nodes.append(node)
        node = node.parent
    nodes.reverse()
    return nodes


def _copies(
    checkpoint: Checkpoint, nodes: Sequence[Node], pages: Sequence[Replica], tail: Replica | None, state: Lease | None
) -> tuple[Copy, ...]:
    copies = [
        Copy(CopyObject.KV_PAGE, node.page.handle, page.handle)
        for node, page in zip(nodes, pages, strict=True)
        if node.page is not None
    ]
    if tail is not None and checkpoint.tail_page is not None:
        copies.append(Copy(CopyObject.KV_PAGE, checkpoint.tail_page.handle, tail.handle))
    if state is not None and checkpoint.slot is not None:
        source = UnitHandle(Tier.DEVICE, checkpoint.slot.units)
        copies.append(Copy(CopyObject.STATE, source, UnitHandle(Tier.HOST, state.units)))
    return tuple(copies)
