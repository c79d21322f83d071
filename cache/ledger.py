"""An audit from scratch: compares pools, trees, checkpoints and leases, trusts none of them, and gives orphans back."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from cache.checkpoints import Checkpoint
from cache.context import ContextCache
from cache.held import Held
from cache.pools import Lease, Pool
from cache.replicas import Replica
from cache.tiers import Tiers
from cache.types import Tier


@dataclass(frozen=True, slots=True)
class AuditReport:
    """What an audit found and did."""

    violations: tuple[str, ...]
    """As they were found, before anything was healed; empty when sound."""
    reclaimed: dict[str, int] = field(default_factory=dict)
    """Units that were given back, by pool."""
    remaining: tuple[str, ...] = ()
    """What healing did not mend."""


def audit(cache: ContextCache) -> AuditReport:
    """Check everything, and where the options allow it give back units that nobody holds; counted in the stats."""
    stats = cache.stats
    stats.audits += 1
    violations = check(cache)
    stats.violations += len(violations)
    if not violations or not cache.options.self_heal:
        return AuditReport(tuple(violations), {}, tuple(violations))
    reclaimed = heal(cache)
    return AuditReport(tuple(violations), reclaimed, tuple(check(cache)))


def check(cache: ContextCache) -> list[str]:
    """One line for each violation, empty when every unit has exactly one owner and every reference a holder."""
    tiers = cache.tiers
    return [
        *(line for pool in _pools(tiers) for line in pool.check()),
        *_check_references(cache),
        *_check_leases(cache),
        *_check_trees(cache),
        *_check_ghosts(tiers),
        *_check_held(cache),
        *(f"{c.name} stands in the wrong line" for c in tiers.store.misplaced()),
        *(line for c in tiers.store if (line := _check_place(c, tiers.options.has_state)) is not None),
    ]


def heal(cache: ContextCache) -> dict[str, int]:
    """Close every lease that nothing refers to, and let the free lists have what is lost; units by pool, counted in the
    stats."""
    tiers = cache.tiers
    known = {id(lease) for lease, _ in _referred(cache)}
    reclaimed: dict[str, int] = {}
    for pool in _pools(tiers):
        units = 0
        for lease in pool.leases():
            if id(lease) not in known:
                units += len(lease)
                lease.close()
        units += pool.reclaim_lost()
        if units:
            reclaimed[pool.name] = units
    tiers.host_states = _count_host_states(cache)
    tiers.stats.orphans_reclaimed.update(reclaimed)
    return reclaimed


def _pools(tiers: Tiers) -> tuple[Pool, Pool, Pool]:
    return tiers.pages, tiers.slots, tiers.host


def _residents(cache: ContextCache) -> Iterator[Checkpoint]:
    """Those that hold units: the live ones, and the forgotten ones that something still reads."""
    yield from cache.tiers.store
    yield from cache.tiers.leaving.values()


def _replicas(cache: ContextCache) -> Iterator[Replica]:
    """Every replica that something refers to, once for each reference of the tree or a tail."""
    for tree in cache.tiers.ghosts.trees.values():
        for node in tree.nodes():
            yield from (replica for replica in (node.page, node.host) if replica is not None)
    for c in _residents(cache):
        yield from (tail for tail in (c.tail_page, c.host_tail) if tail is not None)
    for lease in cache.leases:
        yield from (*lease.pages, *lease.restore_sources, *lease.resume_sources)
    for match in cache.matches:
        yield from match.held_pages
    for demotion in cache.demotions.under_way:
        yield from demotion.written


def _referred(cache: ContextCache) -> Iterator[tuple[Lease, str]]:
    """Every lease that something refers to, and what it is of; a replica's once for each of its references."""
    for replica in _replicas(cache):
        yield replica.lease, "page"
    for c in _residents(cache):
        yield from ((state, "state") for state in (c.slot, c.host_state) if state is not None)
    for lease in cache.leases:
        slots = (lease.slot, *(ticket.slot for ticket in lease.tickets))
        yield from ((slot, "state") for slot in slots if slot is not None)
    for demotion in cache.demotions.under_way:
        if demotion.state is not None:
            yield demotion.state, "state"


def _check_leases(cache: ContextCache) -> list[str]:
    """Each open lease is referred to, each lease that is referred to is open, and a state has one owner."""
    violations: list[str] = []
    states: Counter[int] = Counter()
    known: set[int] = set()
    for lease, what in _referred(cache):
        known.add(id(lease))
        states[id(lease)] += what == "state"
        if not lease.is_open:
            violations.append(f"a {what} that is still referred to was given back")
    for pool in _pools(cache.tiers):
        for lease in pool.leases():
            if id(lease) not in known:
                violations.append(
                    f"pool {pool.name!r}: {len(lease)} units are leased to {lease.holder.name!r} but nothing refers to "
                    "them"
                )
            if states[id(lease)] > 1:
                violations.append(f"pool {pool.name!r}: the state of {lease.holder.name!r} has several owners")
    copied = sum(demotion.device_pages for demotion in cache.demotions.under_way)
    if copied != cache.tiers.copied_pages:
        violations.append(f"{cache.tiers.copied_pages} pages are being copied on record, {copied} found")
    found = _count_host_states(cache)
    if found != cache.tiers.host_states:
        violations.append(f"{cache.tiers.host_states} state images in host memory on record, {found} found")
    return violations


def _count_host_states(cache: ContextCache) -> int:
    kept = sum(c.host_state is not None for c in _residents(cache))
    return kept + sum(demotion.state is not None for demotion in cache.demotions.under_way)


def _check_references(cache: ContextCache) -> list[str]:
    """Each replica has as many references and pins as there are children, checkpoints, requests and copies on it."""
    refs: Counter[int] = Counter()
    for tree in cache.tiers.ghosts.trees.values():
        for node in tree.nodes():
            refs[id(node.page)] += 1
            refs[id(node.host)] += 1
    for c in _residents(cache):
        refs[id(c.tail_page)] += 1
        refs[id(c.host_tail)] += 1
    pins: dict[int, Counter[str]] = defaultdict(Counter)
    for lease in cache.leases:
        for page in (*lease.pages, *lease.restore_sources, *lease.resume_sources):
            pins[id(page)][lease.request_id] += 1
    for match in cache.matches:
        for page in match.held_pages:
            pins[id(page)][match.request_id] += 1
    for demotion in cache.demotions.under_way:
        for page in demotion.written:
            pins[id(page)][demotion.holder.name] += 1
    violations: list[str] = []
    for replica in {id(replica): replica for replica in _replicas(cache)}.values():
        where = f"units {replica.lease.units} on {replica.tier}"
        if replica.cached_refs != refs[id(replica)]:
            violations.append(f"{where}: {replica.cached_refs} cached references on record, {refs[id(replica)]} found")
        recorded = {holder.name: count for holder, count in replica.pins.items()}
        if recorded != dict(pins[id(replica)]):
            violations.append(f"{where}: pins on record {recorded}, found {dict(pins[id(replica)])}")
    return violations + _check_holds(cache)


def _check_holds(cache: ContextCache) -> list[str]:
    """Each node has a replica in a tier exactly as long as a child has one or a checkpoint resides there."""
    holds: Counter[tuple[int, Tier]] = Counter()
    nodes = [node for tree in cache.tiers.ghosts.trees.values() for node in tree.nodes()]
    for node in nodes:
        if node.parent is not None:
            holds[id(node.parent), Tier.DEVICE] += node.page is not None
            holds[id(node.parent), Tier.HOST] += node.host is not None
    for c in _residents(cache):
        holds[id(c.device_node), Tier.DEVICE] += 1
        holds[id(c.node), Tier.HOST] += c.is_in_host
    for demotion in cache.demotions.under_way:
        holds[id(demotion.base), Tier.HOST] += 1
    violations: list[str] = []
    for node in nodes:
        for tier, replica in ((Tier.DEVICE, node.page), (Tier.HOST, node.host)):
            found = holds[id(node), tier]
            if node.holds(tier) != found or (replica is not None) is not (found > 0):
                violations.append(
                    f"a node at depth {node.depth} on {tier}: {node.holds(tier)} holds on record, {found} found"
                )
    return violations


def _check_trees(cache: ContextCache) -> list[str]:
    tiers, violations = cache.tiers, list[str]()
    hung: list[int] = []
    nodes = ghosts = 0
    for namespace, tree in tiers.ghosts.trees.items():
        for node in (tree.root, *tree.nodes()):
            where = f"a node of namespace {namespace!r} at depth {node.depth}"
            hung += [c.number for c in node.checkpoints.values()]
            nodes += node.parent is not None
            ghosts += node.is_ghost
            if node.is_bare and node.is_ghost:
                violations.append(f"{where} leads to no checkpoint")
            if node.parent is not None and len(node.key) != tree.page_size:
                violations.append(f"{where} has {len(node.key)} tokens, not {tree.page_size}")
            known = [(key, not child.is_ghost) for key, child in node.children.items()]
            known += [(tail, c.tail_copy is not None) for tail, c in node.checkpoints.items() if tail]
            if sorted(key for key, is_kept in known if is_kept) != node.keys:
                violations.append(f"{where}: its sorted keys are out of step")
            if sorted(key for key, is_kept in known if not is_kept) != node.ghost_keys:
                violations.append(f"{where}: its sorted keys of ghosts are out of step")
            violations += [
                f"{c.name} does not hang where it says"
                for tail, c in node.checkpoints.items()
                if c.node is not node or c.tail != tail
            ]
    known_numbers = [c.number for c in tiers.store] + [c.number for c in tiers.ghosts]
    if sorted(hung) != sorted(known_numbers):
        violations.append("the trees do not list the same checkpoints as the store and the ghosts")
    if (nodes, ghosts) != (tiers.ghosts.counts.nodes, tiers.ghosts.counts.ghosts):
        violations.append(f"{tiers.ghosts.counts} on record, {nodes} nodes and {ghosts} ghosts found")
    return violations + _check_pins(cache)


def _check_pins(cache: ContextCache) -> list[str]:
    pinned: Counter[int] = Counter()
    pinned.update(lease.pinned.number for lease in cache.leases if lease.pinned is not None)
    pinned.update(match.checkpoint.number for match in cache.matches if match.checkpoint is not None)
    pinned.update(demotion.checkpoint.number for demotion in cache.demotions.under_way)
    return [
        f"{c.name}: {c.pins} pins on record, {pinned[c.number]} found"
        for c in _residents(cache)
        if c.pins != pinned[c.number]
    ]


def _check_ghosts(tiers: Tiers) -> list[str]:
    violations = [f"{c.name} is lost but holds something" for c in tiers.ghosts if c.is_live or c.loss is None]
    violations += [f"{c.name} is live but has a loss" for c in tiers.store if c.loss is not None]
    strays = tiers.store.strays()
    if strays:
        violations.append(f"{strays} places in line are taken by checkpoints that are not live")
    return violations


def _check_held(cache: ContextCache) -> list[str]:
    """Each namespace is on record with what it keeps."""
    found = {tier: Held() for tier in cache.tiers.store.held}
    for namespace, tree in cache.tiers.ghosts.trees.items():
        for node in tree.nodes():
            found[Tier.DEVICE].change(namespace, int(node.page is not None))
            found[Tier.HOST].change(namespace, int(node.host is not None))
    for c in _residents(cache):
        state = 0 if c.host_state is None else len(c.host_state)
        found[Tier.DEVICE].change(c.namespace, int(c.tail_page is not None))
        found[Tier.HOST].change(c.namespace, int(c.host_tail is not None) + state)
    return [
        f"{held.total} units in {tier} memory on record, by namespace, {found[tier].total} found"
        for tier, held in cache.tiers.store.held.items()
        if held.by_namespace() != found[tier].by_namespace()
    ]


def _check_place(c: Checkpoint, has_state: bool) -> str | None:
    """A checkpoint that is live can be resumed: its pages and its state are somewhere, as a whole."""
    is_whole = c.is_in_host or c.is_whole_on_device or (not has_state and c.device_node is not None)
    has_its_state = not has_state or c.host_state is not None or (c.slot is not None and c.is_whole_on_device)
    if c.is_in_host and ((c.host_tail is None) is not (not c.tail) or (c.host_state is None) is has_state):
        return f"{c.name} is not whole in host memory"
    if not is_whole or not has_its_state:
        return f"{c.name} is live but cannot be resumed"
    return None
