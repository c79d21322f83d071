"""The audit finds each kind of damage by itself, and heals what can be healed."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from cache import Frontier, Holder, LossReason, Match, RequestLease, UnitState, audit, check
from cache.checkpoints import Checkpoint
from cache.tree import Node
from tests.cache.house import CLOSURE, House

NOBODY = Holder(UnitState.CACHED, "nobody")


@dataclass
class Busy:
    """Something of everything that can hold units."""

    house: House
    far: Checkpoint
    """In host memory alone, and being restored."""
    near: Checkpoint
    """On the device and in host memory, and matched."""
    copied: Checkpoint
    """On the device, and being copied to host memory."""
    idle: Checkpoint
    """On the device; nobody uses it."""
    ghost: Checkpoint
    restoring: RequestLease
    matching: Match
    capturing: RequestLease

    @property
    def cache(self):
        return self.house.cache

    @property
    def tiers(self):
        return self.house.cache.tiers


def prompt(number):
    """Its turn ends at 10: two full pages, two tokens of a third, and a state."""
    return range(100 * number, 100 * number + 11)


@pytest.fixture
def busy():
    house = House(host_units=40, state_slots=12, kv_pages=64)
    house.keep_in_host(prompt(0), 10)
    house.serve(prompt(1), 10)
    house.demote()
    house.serve(prompt(2), 10)
    house.cache.plan_demotions(house.tick(), 1)
    for number in (3, 4, 6):
        house.serve(prompt(number), 10)
    far, near, copied, idle, ghost, gone = (house.checkpoint(prompt(number)[:10]) for number in (0, 1, 2, 3, 4, 6))
    house.cache.tiers.lose(ghost, LossReason.EVICTED_STATE)
    house.cache.distrust(house.admit(prompt(6)))
    restoring, matching = house.admit(prompt(0)), house.match(prompt(1))
    capturing = house.admit(prompt(5), [Frontier(10, CLOSURE)])
    house.cache.capture(capturing, Frontier(10, CLOSURE))
    house.assert_sound()
    assert restoring.is_restoring
    assert gone.number in house.cache.tiers.leaving
    assert len(house.cache.demotions.under_way) == 1
    return Busy(house, far, near, copied, idle, ghost, restoring, matching, capturing)


def add_ref(busy):
    busy.idle.tail_page.cached_refs += 1


def drop_ref(busy):
    busy.idle.tail_page.cached_refs -= 1


def drop_pin(busy):
    busy.restoring.pages[0].pins.clear()


def add_hold(busy):
    busy.idle.node.page_holds += 1


def add_host_hold(busy):
    busy.near.node.host_holds += 1


def drop_replica(busy):
    busy.idle.node.page = None


def take_a_slot(busy):
    busy.cache.slots.lease(NOBODY, 1)


def take_host_units(busy):
    busy.cache.host.lease(NOBODY, 3)


def close_state(busy):
    busy.idle.slot.close()


def close_page(busy):
    busy.idle.tail_page.lease.close()


def share_a_state(busy):
    busy.idle.slot, old = busy.near.slot, busy.idle.slot
    old.close()


def bare_node(busy):
    node = Node(busy.idle.tree.root, (1, 2, 3, 4))
    busy.idle.tree.root.children[node.key] = node
    busy.idle.tree.root.ghost_keys.insert(0, node.key)
    busy.tiers.ghosts.counts.nodes += 1
    busy.tiers.ghosts.counts.ghosts += 1


def hang_twice(busy):
    busy.ghost.node.checkpoints[(0,)] = busy.ghost
    busy.ghost.node.ghost_keys.insert(0, (0,))


def hang_twice_behind(busy):
    busy.ghost.node.checkpoints[(9999,)] = busy.ghost
    busy.ghost.node.ghost_keys.append((9999,))


def lose_in_the_tree_only(busy):
    del busy.ghost.node.checkpoints[busy.ghost.tail]


def move_to_another_node(busy):
    busy.idle.node = busy.near.node


def wait_in_no_line(busy):
    busy.tiers.store.slots.place(busy.idle, holds=False, is_ready=False)


def wait_though_pinned(busy):
    busy.tiers.store.host.others.add(busy.far)


def wait_though_lost(busy):
    busy.tiers.store.slots.others.add(busy.ghost)


def change(of, name, by):
    def damage(busy):
        target = of(busy)
        setattr(target, name, getattr(target, name) + by)

    return damage


def put(of, name, value):
    return lambda busy: setattr(of(busy), name, value)


@pytest.mark.parametrize(
    ("damage", "violation"),
    [
        (lambda busy: busy.cache.pages._free.pop(), "pool 'device_kv_pages': unit 19 is lost"),
        (lambda busy: busy.cache.slots._free.pop(), "pool 'device_state_slots': unit 8 is lost"),
        (lambda busy: busy.cache.host._free.pop(), "pool 'host_units': unit"),
        (add_ref, "2 cached references on record, 1 found"),
        (drop_ref, "0 cached references on record, 1 found"),
        (drop_pin, "pins on record {}, found {'r8': 1}"),
        (add_hold, "a node at depth 2 on device: 2 holds on record, 1 found"),
        (
            change(lambda busy: busy.idle.node, "page_holds", -1),
            "a node at depth 2 on device: 0 holds on record, 1 found",
        ),
        (add_host_hold, "a node at depth 2 on host: 2 holds on record, 1 found"),
        (drop_replica, "a node at depth 2 on device: 1 holds on record, 1 found"),
        (take_a_slot, "pool 'device_state_slots': 1 units are leased to 'nobody' but nothing refers to them"),
        (take_host_units, "pool 'host_units': 3 units are leased to 'nobody' but nothing refers to them"),
        (close_state, "a state that is still referred to was given back"),
        (close_page, "a page that is still referred to was given back"),
        (share_a_state, "pool 'device_state_slots': the state of 'checkpoint-2' has several owners"),
        (change(lambda busy: busy.tiers, "copied_pages", 1), "4 pages are being copied on record, 3 found"),
        (change(lambda busy: busy.tiers, "copied_pages", -1), "2 pages are being copied on record, 3 found"),
        (change(lambda busy: busy.tiers, "host_states", -1), "2 state images in host memory on record, 3 found"),
        (change(lambda busy: busy.tiers, "host_states", 1), "4 state images in host memory on record, 3 found"),
        (bare_node, "a node of namespace 'n' at depth 1 leads to no checkpoint"),
        (put(lambda busy: busy.idle.node, "key", (1, 2, 3)), "a node of namespace 'n' at depth 2 has 3 tokens, not 4"),
        (put(lambda busy: busy.idle.node, "key", (1, 2, 3, 4, 5)), "at depth 2 has 5 tokens, not 4"),
        (lambda busy: busy.idle.node.keys.append((9999,)), "depth 2: its sorted keys are out of step"),
        (lambda busy: busy.idle.node.keys.insert(0, (0,)), "depth 2: its sorted keys are out of step"),
        (lambda busy: busy.ghost.node.ghost_keys.append((9999,)), "depth 2: its sorted keys of ghosts are out of step"),
        (lambda busy: busy.idle.node.keys.pop(), "a node of namespace 'n' at depth 2: its sorted keys are out of step"),
        (lambda busy: busy.ghost.node.ghost_keys.pop(), "depth 2: its sorted keys of ghosts are out of step"),
        (hang_twice_behind, "checkpoint-5 does not hang where it says"),
        (hang_twice, "checkpoint-5 does not hang where it says"),
        (move_to_another_node, "checkpoint-4 does not hang where it says"),
        (lambda busy: busy.tiers.ghosts.remove(busy.ghost), "do not list the same checkpoints as the store"),
        (change(lambda busy: busy.tiers.ghosts.counts, "nodes", 1), "on record, 12 nodes and 2 ghosts found"),
        (change(lambda busy: busy.tiers.ghosts.counts, "nodes", -1), "on record, 12 nodes and 2 ghosts found"),
        (change(lambda busy: busy.tiers.ghosts.counts, "ghosts", -1), "on record, 12 nodes and 2 ghosts found"),
        (lose_in_the_tree_only, "do not list the same checkpoints as the store"),
        (change(lambda busy: busy.tiers.ghosts.counts, "ghosts", 1), "on record, 12 nodes and 2 ghosts found"),
        (change(lambda busy: busy.near, "pins", 1), "checkpoint-2: 2 pins on record, 1 found"),
        (change(lambda busy: busy.far, "pins", 1), "checkpoint-1: 2 pins on record, 1 found"),
        (change(lambda busy: busy.copied, "pins", -1), "checkpoint-3: 0 pins on record, 1 found"),
        (put(lambda busy: busy.ghost, "is_in_host", True), "checkpoint-5 is lost but holds something"),
        (put(lambda busy: busy.ghost, "loss", None), "checkpoint-5 is lost but holds something"),
        (put(lambda busy: busy.idle, "loss", LossReason.COLD), "checkpoint-4 is live but has a loss"),
        (wait_in_no_line, "checkpoint-4 stands in the wrong line"),
        (wait_though_pinned, "checkpoint-1 stands in the wrong line"),
        (wait_though_lost, "1 places in line are taken by checkpoints that are not live"),
        (put(lambda busy: busy.near, "host_tail", None), "checkpoint-2 is not whole in host memory"),
        (put(lambda busy: busy.near, "host_state", None), "checkpoint-2 is not whole in host memory"),
        (put(lambda busy: busy.idle, "slot", None), "checkpoint-4 is live but cannot be resumed"),
        (put(lambda busy: busy.idle, "tail_page", None), "checkpoint-4 is live but cannot be resumed"),
        (put(lambda busy: busy.idle, "device_node", None), "checkpoint-4 is live but cannot be resumed"),
    ],
)
def test_an_audit_finds_damage(busy, damage, violation):
    damage(busy)
    assert any(violation in line for line in check(busy.cache)), check(busy.cache)


def test_a_model_without_states_resumes_from_a_part_but_not_from_nothing():
    house = House(has_state=False)
    house.serve(range(11), 11)
    kept = house.checkpoint(range(11))
    house.cache.tiers.shrink(kept, 1)
    assert (kept.is_whole_on_device, check(house.cache)) == (False, [])
    kept.device_node = None
    assert "checkpoint-1 is live but cannot be resumed" in check(house.cache)


def test_an_audit_of_a_busy_cache_finds_nothing_and_says_so_twice(busy):
    for number in (1, 2):
        report = audit(busy.cache)
        assert (report.violations, report.reclaimed, report.remaining) == ((), {}, ())
        assert (busy.cache.stats.audits, busy.cache.stats.violations) == (number, 0)


def test_orphans_come_back_in_each_pool_and_are_counted(busy):
    free = [pool.free for pool in (busy.cache.pages, busy.cache.slots, busy.cache.host)]
    busy.cache.pages.lease(NOBODY, 2)
    take_a_slot(busy)
    take_host_units(busy)
    report = audit(busy.cache)
    reclaimed = {"device_kv_pages": 2, "device_state_slots": 1, "host_units": 3}
    assert (len(report.violations), report.reclaimed, report.remaining) == (3, reclaimed, ())
    assert [pool.free for pool in (busy.cache.pages, busy.cache.slots, busy.cache.host)] == free
    assert busy.cache.stats.orphans_reclaimed == reclaimed
    assert busy.cache.stats.violations == 3


def test_what_fell_out_of_the_books_comes_back_in_each_pool(busy):
    for pool in (busy.cache.pages, busy.cache.slots, busy.cache.host):
        pool._free.pop()
    report = audit(busy.cache)
    assert report.reclaimed == {"device_kv_pages": 1, "device_state_slots": 1, "host_units": 1}
    assert (report.remaining, check(busy.cache)) == ((), [])


def test_healing_leaves_alone_what_somebody_holds(busy):
    take_a_slot(busy)
    audit(busy.cache)
    busy.house.compute(busy.restoring)
    assert busy.house.reused(prompt(3)) == 10


def test_healing_counts_the_state_images_anew(busy):
    busy.tiers.host_states = 0
    report = audit(busy.cache)
    assert (len(report.violations), report.remaining, busy.tiers.host_states) == (1, (), 3)


def test_what_healing_cannot_mend_remains_in_the_report(busy):
    busy.near.pins += 1
    report = audit(busy.cache)
    assert report.remaining == report.violations == ("checkpoint-2: 2 pins on record, 1 found",)


def test_a_page_that_only_a_match_still_refers_to_is_no_orphan():
    house = House(has_state=False)
    house.serve(range(9), 9)
    match = house.match(range(10))
    house.cache.tiers.lose(house.checkpoint(range(9)), LossReason.EVICTED_KV)
    assert audit(house.cache).violations == ()
    assert house.cache.pages.counts().pinned == 3
    house.cache.release(match)
    house.assert_nothing_held()


def test_with_self_heal_off_damage_is_told_and_left():
    house = House(self_heal=False)
    house.cache.slots.lease(NOBODY, 1)
    for found in (1, 2):
        report = audit(house.cache)
        assert (len(report.violations), report.reclaimed, report.remaining) == (1, {}, report.violations)
        assert house.cache.stats.violations == found
    assert house.cache.slots.counts().cached == 1


def test_host_states_that_leak_are_found_and_healed():
    house = House(host_units=20)
    house.keep_in_host(prompt(0), 10)
    house.cache.faults.switch(["leak_host_state"])
    house.cache.reset(["host"])
    house.cache.faults.switch([])
    assert house.cache.host.free == 18
    report = audit(house.cache)
    assert (report.reclaimed, report.remaining) == ({"host_units": 2}, ())
    assert (house.cache.host.free, house.cache.tiers.host_states) == (20, 0)
