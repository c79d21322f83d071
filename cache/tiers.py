"""Where bytes are kept: the pools, how a checkpoint leaves each of them, and who leaves when room is needed."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice

from cache.checkpoints import Checkpoint, CheckpointStore, Line
from cache.faults import Fault, Faults
from cache.freed import Freed
from cache.ghosts import Ghosts
from cache.pools import Holder, Lease, Pool
from cache.replicas import Replica
from cache.stats import CacheStats
from cache.tree import Node
from cache.types import CacheOptions, CheckpointKind, LossReason, Tier

_REFRESHES = 4
"""How often a victim is looked for again because it turned out to be worth more than it was."""

_MOST_NODES_BELOW = 4096

Order = tuple[bool, bool, float, int]


class Tiers:
    """The pools and every checkpoint in them. Mutable: only the engine loop's task may touch it."""

    def __init__(self, options: CacheOptions, stats: CacheStats, faults: Faults) -> None:
        self.options = options
        self.stats = stats
        self.faults = faults
        self.pages = Pool("device_kv_pages", options.kv_pages)
        self.slots = Pool("device_state_slots", options.state_slots if options.has_state else 0)
        self.host = Pool("host_units", options.host_units)
        self.host_states = 0
        """State images that take up host memory, those under way to it included."""
        self.store = CheckpointStore()
        self.ghosts = Ghosts(options, self.store.held)
        self.copied_pages = 0
        """Cached pages on the device that stay there, because they are copied to host memory; shared ones count for
        each."""
        self.leaving: dict[int, Checkpoint] = {}
        """Forgotten, but something still reads from them."""
        self.now = 0.0
        """The latest time that a caller has told."""

    # -- room on the device

    def has_room(self, pages: int, slots: int) -> bool:
        """Whether so much can be had on the device, at the cost of what nobody uses."""
        if self.pages.free + self.pages.counts().cached - self.copied_pages < pages:
            return False
        return slots == 0 or self.slots.free > 0 or len(self.store.slots) > 0

    def take_slot(self, holder: Holder, namespace: str) -> Lease:
        """A state slot, from the free ones or from what is worth least."""
        while not self.slots.free:
            victim = self.victim(self.store.slots, namespace)
            if victim is None:
                break
            self.stats.evictions[self.slots.name, victim.kind] += 1
            before = self._free()
            self.drop_slot(victim, gives_way=True)
            self._count_surplus(before, {self.slots.name: 1})
        self.stats.granted[self.slots.name] += 1
        return self.slots.lease(holder, 1)

    def take_pages(self, count: int, holder: Holder, namespace: str) -> list[Replica] | None:
        """So many pages. None where the pool says that so many are there, and they are nobody's: until an audit, they
        are lost."""
        self.free_pages(count, namespace)
        if self.pages.free < count:
            return None
        self.stats.granted[self.pages.name] += count
        return [Replica(lease, Tier.DEVICE) for lease in self.pages.singles(holder, count)]

    def free_pages(self, count: int, namespace: str) -> None:
        """Make so many pages free, or as many as can be: page by page from the end of what is worth least, for as long
        as the rest of it can still be resumed."""
        while self.pages.free < count:
            victim = self.victim(self.store.pages, namespace)
            if victim is None:
                return
            if victim.is_whole_on_device:
                self.stats.evictions[self.pages.name, victim.kind] += 1
            before = self._free()
            self.shrink(victim, count - self.pages.free)
            self._count_surplus(before, {self.pages.name: count})

    def victim(self, line: Line, namespace: str | None = None) -> Checkpoint | None:
        """The next to give way, for the sake of `namespace`, which may not push out one that has less than its share;
        None when every one is pinned."""
        found: Checkpoint | None = None
        for _ in range(_REFRESHES):
            found = line.first(self.now)
            if found is None or not self.refresh(found):
                break
        if found is None or namespace is None or not line.held.favours(found.namespace, over=namespace):
            return found
        return line.first(self.now, namespace) or found

    def order(self, checkpoint: Checkpoint) -> Order:
        """Smaller gives way first."""
        value = self.store.slots.others.value(checkpoint, self.now)
        return (*self._class(checkpoint), value, checkpoint.number)

    def _class(self, checkpoint: Checkpoint) -> tuple[bool, bool]:
        """What comes before its value: what is superseded, and, while that is due, what a plain cache would not hold,
        gives way first."""
        return not checkpoint.is_superseded, checkpoint.is_plain and self.store.regret.is_due

    def refresh(self, checkpoint: Checkpoint) -> bool:
        """Work out anew what it saves, for its ancestors may have gone; whether that has changed."""
        benefit = checkpoint.frontier_tokens - self.surviving_ancestor_tokens(checkpoint)
        if benefit == checkpoint.benefit_tokens:
            return False
        checkpoint.benefit_tokens = benefit
        self.store.place(checkpoint)
        return True

    def refresh_below(self, checkpoint: Checkpoint) -> None:
        """It came: the next ones on each way that goes on from it save so much less, and are not to drive it out."""
        size = len(checkpoint.tail)
        nodes = [child for key, child in checkpoint.node.children.items() if key[:size] == checkpoint.tail]
        found = [c for tail, c in checkpoint.node.checkpoints.items() if tail[:size] == checkpoint.tail]
        for node in islice(nodes, _MOST_NODES_BELOW):  # Grows as it goes.
            found += node.checkpoints.values()
            if all(c.is_superseded or not c.is_live for c in node.checkpoints.values()):
                nodes += node.children.values()
        for each in found:
            if each is not checkpoint and each in self.store:
                self.refresh(each)

    @staticmethod
    def surviving_ancestor_tokens(checkpoint: Checkpoint) -> int:
        """The frontier of the nearest checkpoint above that is live, and shared or not superseded; 0 for none: a prefix
        that one conversation alone stands on gives way to it, and stays the less for it to save when another comes."""
        node, below, size = checkpoint.node, checkpoint.tail, checkpoint.tree.page_size
        while True:
            for other in node.checkpoints_along(below):
                counts = other.kind.is_shared or not other.is_superseded
                if other is not checkpoint and other.is_live and counts:
                    return node.depth * size + len(other.tail)
            if node.parent is None:
                return 0
            below, node = node.key, node.parent

    # -- ways out of a tier

    def drop_slot(self, checkpoint: Checkpoint, *, gives_way: bool = False) -> None:
        """Its state leaves the device; `gives_way` is whether somebody needs its room."""
        self._release_slot(checkpoint)
        self._settle(checkpoint, LossReason.EVICTED_STATE, gives_way=gives_way)

    def shrink(self, checkpoint: Checkpoint, pages: int) -> None:
        """Its last pages leave the device for somebody who needs them, until `pages` of them are free or it has none
        there."""
        if self.options.has_state and not checkpoint.is_in_host:
            # A state without all of its KV is of no use.
            self.lose(checkpoint, LossReason.EVICTED_KV, gives_way=True)
            return
        enough = self.pages.free + pages
        while self.pages.free < enough and checkpoint.device_node is not None:
            self._shrink_by_one(checkpoint, checkpoint.device_node)
        self._settle(checkpoint, LossReason.EVICTED_KV, gives_way=True)

    def drop_device(self, checkpoint: Checkpoint, reason: LossReason) -> None:
        """It leaves the device as a whole."""
        self._release_device(checkpoint)
        self._settle(checkpoint, reason)

    def drop_host(self, checkpoint: Checkpoint, reason: LossReason, *, gives_way: bool = False) -> None:
        """It leaves host memory as a whole."""
        self._release_host(checkpoint)
        self._settle(checkpoint, reason, gives_way=gives_way)

    def lose(self, checkpoint: Checkpoint, reason: LossReason, *, gives_way: bool = False) -> None:
        """It becomes a ghost. It must not be pinned."""
        self._release_device(checkpoint)
        self._release_host(checkpoint)
        self.store.remove(checkpoint)
        checkpoint.loss, checkpoint.gave_way = reason, gives_way
        checkpoint.is_bet = gives_way and not self.store.regret.is_due
        checkpoint.is_refused = False
        self.stats.checkpoints_dropped += 1
        self.ghosts.add(checkpoint)

    def forget(self, checkpoint: Checkpoint) -> None:
        """It goes without a trace: nobody finds it from now on, and once nothing reads from it, it holds nothing."""
        if checkpoint in self.store:
            self.store.remove(checkpoint)
        self.ghosts.forget(checkpoint)
        self.leaving[checkpoint.number] = checkpoint
        self._bury(checkpoint)

    def unpin(self, checkpoint: Checkpoint) -> None:
        """A request or a copy no longer reads from it."""
        self.store.unpin(checkpoint)
        self._bury(checkpoint)

    def _bury(self, checkpoint: Checkpoint) -> None:
        if checkpoint.pins == 0 and self.leaving.pop(checkpoint.number, None) is not None:
            self._release_device(checkpoint)
            self._release_host(checkpoint)

    def _settle(self, checkpoint: Checkpoint, reason: LossReason, *, gives_way: bool = False) -> None:
        """What is left of it either can be resumed or is of no use."""
        if self.options.has_state:
            is_of_use_here = checkpoint.slot is not None and checkpoint.is_whole_on_device
        else:
            is_of_use_here = checkpoint.device_node is not None
        if checkpoint.is_in_host or is_of_use_here:
            self.store.place(checkpoint)
        else:
            self.lose(checkpoint, reason, gives_way=gives_way)

    def _free(self) -> dict[str, int]:
        return {pool.name: pool.free for pool in (self.pages, self.slots, self.host)}

    def _count_surplus(self, before: Mapping[str, int], asked: Mapping[str, int]) -> None:
        """What whole victims gave back since `before`, beyond what was to be free."""
        for name, free in self._free().items():
            surplus = free - max(before[name], asked.get(name, 0))
            if surplus > 0:
                self.stats.surplus[name] += surplus

    def _shrink_by_one(self, checkpoint: Checkpoint, node: Node) -> None:
        """`node` is how far down it holds pages on the device."""
        tree = checkpoint.tree
        if checkpoint.tail_page is not None:
            self._release_tail(checkpoint)
            if node.parent is None:
                checkpoint.device_node = None
            return
        parent = node.parent
        if parent is None or parent.parent is None:
            checkpoint.device_node = None
        else:
            tree.hold(parent, Tier.DEVICE, ())
            checkpoint.device_node = parent
        tree.let_go(node, Tier.DEVICE)

    def _release_tail(self, checkpoint: Checkpoint) -> None:
        page = checkpoint.tail_page
        if page is not None:
            checkpoint.tree.change_tail(checkpoint, lambda: setattr(checkpoint, "tail_page", None))
            page.unref()

    def _release_slot(self, checkpoint: Checkpoint) -> None:
        if checkpoint.slot is not None:
            checkpoint.slot.close()
            checkpoint.slot = None

    def _release_device(self, checkpoint: Checkpoint) -> None:
        self._release_slot(checkpoint)
        self._release_tail(checkpoint)
        if checkpoint.device_node is not None:
            checkpoint.tree.let_go(checkpoint.device_node, Tier.DEVICE)
            checkpoint.device_node = None

    def _release_host(self, checkpoint: Checkpoint) -> None:
        if not checkpoint.is_in_host:
            return
        checkpoint.is_in_host = False
        state, checkpoint.host_state = checkpoint.host_state, None
        if state is not None:
            self.store.held[Tier.HOST].change(checkpoint.namespace, -len(state))
        if state is not None and Fault.LEAK_HOST_STATE not in self.faults:
            self.close_host_state(state)
        tail = checkpoint.host_tail
        if tail is not None:
            checkpoint.tree.change_tail(checkpoint, lambda: setattr(checkpoint, "host_tail", None))
            tail.unref()
        checkpoint.tree.let_go(checkpoint.node, Tier.HOST)

    # -- room in host memory

    def close_host_state(self, lease: Lease) -> None:
        lease.close()
        self.host_states -= 1

    def has_host_room(self, units: int, states: int) -> bool:
        cap = self.options.host_state_cap
        return self.host.free >= units and (cap is None or self.host_states + states <= cap)

    def make_host_room(self, units: int, states: int, candidate: Checkpoint) -> bool:
        """Room for `candidate`: first at the cost of copies of what is on the device, then of what is worth less than
        it and has its share, then of whose namespace has more than its share where the candidate's has less. False, and
        nobody has left, when what is there is worth more, or in use; what is superseded is worth no more than what is
        there."""
        line, order, before = self.store.host, self.order(candidate), self._free()
        while not self.has_host_room(units, states):
            victims = [] if candidate.is_superseded else self._host_victims(units, states, candidate)
            if not victims:
                return False
            for victim in victims:
                if victim in line.others:
                    self.stats.evictions[self.host.name, victim.kind] += 1
                elif self.order(victim) < order:
                    victim.is_refused = True
                reason = LossReason.EVICTED_STATE if self.options.has_state else LossReason.EVICTED_KV
                self.drop_host(victim, reason, gives_way=True)
        self._count_surplus(before, {self.host.name: units})
        return True

    def _host_victims(self, units: int, states: int, candidate: Checkpoint) -> list[Checkpoint]:
        """Who has to leave host memory for `candidate`; none when not enough of them may. All are still there."""
        freed, victims = Freed(), list[Checkpoint]()
        while not self.has_host_room(units - freed.units, states - freed.states):
            victim = self._host_victim(candidate)
            is_of_its_own = victim is not None and victim.namespace == candidate.namespace and not victim.is_superseded
            if victim is None or is_of_its_own:
                victim = self._owed_in_host(candidate, units) or victim
            if victim is None:
                break
            freed.add(victim)
            victims.append(victim)
            self.store.host.place(victim, holds=False, is_ready=False)
        for victim in victims:
            self.store.place(victim)
        return victims if self.has_host_room(units - freed.units, states - freed.states) else []

    def _host_victim(self, candidate: Checkpoint) -> Checkpoint | None:
        line, order = self.store.host, self.order(candidate)
        while True:
            spare, least = line.ready.least(self.now), self._least_in_host(candidate.namespace)
            if least is not None and not self.order(least) < order:
                least = None
            if isinstance(spare, Checkpoint) and self._spare_goes_first(spare, least, order):
                return spare
            if least is None:
                return None
            if not self.refresh(least):
                return least

    def _spare_goes_first(self, spare: Checkpoint, least: Checkpoint | None, order: Order) -> bool:
        """Whether the copy of what the device has yields before what may go of the rest, for what ranks as `order`: if
        it will stay on the device the longer, and the rest is of a worth to be weighed at all."""
        if least is None:
            return True
        return self.order(spare) > order and not self._class(least) < self._class(spare)

    def _least_in_host(self, namespace: str) -> Checkpoint | None:
        """Of what host memory alone has, what is worth least and may give way to that namespace."""
        line = self.store.host
        least = line.others.least(self.now)
        if isinstance(least, Checkpoint) and line.held.favours(least.namespace, over=namespace):
            least = line.others.least(self.now, namespace)
        return least if isinstance(least, Checkpoint) else None

    def may_displace_in_host(self, checkpoint: Checkpoint, units: int) -> bool:
        """Whether anything in host memory would give way to it, whose copy takes so many units."""
        if checkpoint.is_superseded:
            return False
        least = self._least_in_host(checkpoint.namespace)
        if least is not None and self.order(least) < self.order(checkpoint):
            return True
        return self._owed_in_host(checkpoint, units) is not None

    def _owed_in_host(self, checkpoint: Checkpoint, units: int) -> Checkpoint | None:
        """What is worth least to the namespace that keeps most of host memory, where it gives way to a namespace below
        its share, whatever either is worth: who has long prompts would have all of it. A namespace to which nobody
        returned has no such right, or whoever takes a new name for each request would have it all."""
        if checkpoint.is_superseded or not checkpoint.tree.has_returns:
            return None
        line = self.store.host
        owing = line.held.owing(checkpoint.namespace, units, self.host.capacity)
        if owing is None:
            return None
        least = line.others.least(self.now, owing) or line.ready.least(self.now, owing)
        return least if isinstance(least, Checkpoint) else None

    def is_anchor_worth_less(self, kind: CheckpointKind) -> bool:
        """Whether a fresh anchor, which nobody has used yet, would drive out what is worth more."""
        victim = self.store.slots.first(self.now)
        if kind is not CheckpointKind.PRIVATE_LONG_ANCHOR or victim is None:
            return False
        return not (victim.is_superseded or victim.is_in_host)
