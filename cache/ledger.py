"""An audit from scratch: compares pools, trees, checkpoints and leases, and trusts none of them."""

from __future__ import annotations

from collections import Counter, defaultdict

from cache.context import ContextCache
from cache.pages import Page
from cache.pools import Lease


def check(cache: ContextCache) -> list[str]:
    """One line for each violation, empty when every unit has exactly one owner and every reference a holder."""
    violations = [*cache.pages.check(), *cache.slots.check()]
    violations += _check_pages(cache)
    violations += _check_slots(cache)
    violations += _check_trees(cache)
    violations += [f"{c.name} can be evicted but the heap cannot find it" for c in cache.retention.store.unreachable()]
    return violations


def _check_pages(cache: ContextCache) -> list[str]:
    cached: Counter[int] = Counter()
    pins: Counter[tuple[int, str]] = Counter()
    pages: dict[int, Page] = {}

    def seen(page: Page) -> int:
        pages[id(page)] = page
        return id(page)

    for tree in cache.retention.trees.values():
        cached.update(seen(node.page) for node in tree.nodes() if node.page is not None)
    cached.update(seen(c.tail_page) for c in cache.retention.store if c.tail_page is not None)
    for lease in cache.leases:
        pins.update((seen(page), lease.request_id) for page in (*lease.pages, *lease.restore_sources))
    for match in cache.matches:
        pins.update((seen(page), match.request_id) for page in match.held_pages)
    pins_of: dict[int, dict[str, int]] = defaultdict(dict)
    for (key, request_id), count in pins.items():
        pins_of[key][request_id] = count
    violations: list[str] = []
    for key, page in pages.items():
        if not page.lease.is_open:
            violations.append("a page that is still referred to was given back")
            continue
        if page.cached_refs != cached[key]:
            violations.append(f"page {page.unit}: {page.cached_refs} cached references on record, {cached[key]} found")
        if page.pins != pins_of[key]:
            violations.append(f"page {page.unit}: pins on record {page.pins}, found {pins_of[key]}")
    referred = {page.unit for page in pages.values() if page.lease.is_open}
    return violations + _orphans(cache.pages.leases(), referred, "page")


def _check_slots(cache: ContextCache) -> list[str]:
    held: list[Lease] = [c.slot for c in cache.retention.store if c.slot is not None]
    for lease in cache.leases:
        held += [slot for slot in (lease.slot, *(ticket.slot for ticket in lease.tickets)) if slot is not None]
    violations = ["a state slot that is still referred to was given back" for slot in held if not slot.is_open]
    units = [unit for slot in held for unit in slot.units]
    violations += [f"state slot {unit} has {count} owners" for unit, count in Counter(units).items() if count > 1]
    return violations + _orphans(cache.slots.leases(), set(units), "state slot")


def _orphans(leases: tuple[Lease, ...], referred: set[int], what: str) -> list[str]:
    return [
        f"{what} {unit} is leased to {lease.holder.name!r} but nothing refers to it"
        for lease in leases
        for unit in lease.units
        if unit not in referred
    ]


def _check_trees(cache: ContextCache) -> list[str]:
    violations: list[str] = []
    hung: list[int] = []
    for namespace, tree in cache.retention.trees.items():
        for node in (tree.root, *tree.nodes()):
            hung += [c.number for c in node.checkpoints.values()]
            if node.parent is not None and node.is_bare:
                violations.append(f"a node of namespace {namespace!r} at depth {node.depth} leads to no checkpoint")
            if node.parent is not None and len(node.key) != tree.page_size:
                violations.append(f"a node of namespace {namespace!r} has {len(node.key)} tokens, not {tree.page_size}")
            if sorted([*node.children, *(tail for tail in node.checkpoints if tail)]) != node.keys:
                violations.append(f"the sorted keys of a node of namespace {namespace!r} are out of step")
            for tail, c in node.checkpoints.items():
                if c.node is not node or c.tail != tail or (c.tail_page is None) != (not tail):
                    violations.append(f"{c.name} does not hang where it says")
    if sorted(hung) != sorted(c.number for c in cache.retention.store):
        violations.append("the trees and the store do not list the same checkpoints")
    pinned: Counter[int] = Counter()
    pinned.update(lease.restore_checkpoint.number for lease in cache.leases if lease.restore_checkpoint is not None)
    pinned.update(match.checkpoint.number for match in cache.matches if match.checkpoint is not None)
    violations += [
        f"{c.name}: {c.pins} pins on record, {pinned[c.number]} found"
        for c in cache.retention.store
        if c.pins != pinned[c.number]
    ]
    return violations
