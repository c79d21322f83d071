"""Copies to host memory ahead of eviction: what is copied, what waits, and what each ending leaves behind."""

from __future__ import annotations

import pytest

from cache import CacheOptions, ContextCache, CopyObject, LossReason, SkipReason, Tier, UnitState
from cache.upkeep import quarantine
from tests.cache.house import EVERYTHING, House, prefix_of

KV, STATE = CopyObject.KV_PAGE, CopyObject.STATE
CHAT = range(11)
"""Its turn ends at 10: two full pages, two tokens of a third, and a state."""


@pytest.fixture
def house():
    house = House(host_units=20)
    house.serve(CHAT, 10)
    return house


def plan(house, most_bytes=EVERYTHING):
    return house.cache.plan_demotions(house.tick(), most_bytes)


def test_a_demotion_copies_each_page_and_the_state(house):
    kept = house.checkpoint(CHAT[:10])
    [demotion] = plan(house)
    pages = [kept.node.parent.page.handle, kept.node.page.handle, kept.tail_page.handle]
    assert [c.source for c in demotion.copies[:3]] == pages
    assert [c.what for c in demotion.copies] == [KV, KV, KV, STATE]
    assert all(c.destination.tier is Tier.HOST for c in demotion.copies)
    assert [len(c.destination.units) for c in demotion.copies] == [1, 1, 1, 2]
    assert demotion.size_bytes == 3 * 10 + 25


def test_nothing_is_in_host_memory_before_its_bytes_are(house):
    [demotion] = plan(house)
    assert not house.checkpoint(CHAT[:10]).is_in_host
    assert (house.cache.host.counts().in_flight, house.cache.host.counts().cached) == (5, 0)
    house.assert_sound()
    house.cache.confirm_demotion(demotion, house.tick())
    assert house.checkpoint(CHAT[:10]).is_in_host
    assert (house.cache.host.counts().in_flight, house.cache.host.counts().cached) == (0, 5)
    assert house.cache.stats.checkpoints_demoted == 1


def test_a_cancelled_demotion_gives_everything_back_and_can_be_planned_again(house):
    [demotion] = plan(house)
    for _ in range(2):
        house.cache.cancel_demotion(demotion)
    house.cache.confirm_demotion(demotion, house.tick())
    house.assert_nothing_held()
    assert house.cache.host.free == house.cache.host.capacity
    assert not house.checkpoint(CHAT[:10]).is_in_host
    assert [prefix_of(d.checkpoint) for d in plan(house)] == [tuple(CHAT[:10])]


def test_a_confirmed_demotion_is_not_undone_by_a_late_cancel(house):
    [demotion] = house.demote()
    house.cache.cancel_demotion(demotion)
    house.assert_nothing_held()
    assert house.checkpoint(CHAT[:10]).is_in_host


def test_what_is_in_host_memory_is_not_copied_again(house):
    house.demote()
    assert plan(house) == []


def test_only_the_pages_that_host_memory_lacks_are_copied(house):
    house.demote()
    house.serve(range(17), 16)
    [demotion] = plan(house)
    kept = house.checkpoint(range(16))
    new_pages = [kept.node.parent.page.handle, kept.node.page.handle]
    assert [c.source for c in demotion.copies] == [*new_pages, demotion.copies[-1].source]
    assert demotion.copies[-1].what is STATE


def test_what_host_memory_has_of_a_path_stays_while_the_rest_is_copied(house):
    house.demote()
    house.serve(range(17), 16)
    [demotion] = plan(house)
    house.cache.tiers.drop_host(house.checkpoint(CHAT[:10]), LossReason.EVICTED_STATE)
    assert demotion.base.host is not None
    house.assert_sound()
    house.device.run(demotion.copies)
    house.cache.confirm_demotion(demotion, house.tick())
    house.cache.reset([Tier.DEVICE])
    house.compute(house.admit(range(17)))


def test_two_that_share_missing_pages_are_copied_one_after_the_other(house):
    house.serve((*range(8), 70, 71, 72), 11)
    assert len(plan(house)) == 1
    house.cache.cancel_demotion(house.cache.demotions.under_way[0])
    house.demote()
    [second] = house.demote()
    assert [c.what for c in second.copies] == [KV, STATE]


@pytest.mark.parametrize(("most_bytes", "planned"), [(0, 0), (1, 1), (55, 1), (56, 2), (110, 2), (111, 3)])
def test_as_many_begin_as_the_bytes_last(house, most_bytes, planned):
    for first in (100, 200):
        house.serve(range(first, first + 11), 10)
    assert len(plan(house, most_bytes)) == planned


def test_without_host_memory_nothing_is_copied():
    house = House(host_units=0)
    house.serve(CHAT, 10)
    assert plan(house) == []


def test_vacant_host_memory_is_filled_ahead_of_need():
    house = House(host_units=60, state_slots=8, demote_ahead=0)
    for first in (0, 100, 200):
        house.serve(range(first, first + 9), 8)
    assert (house.cache.slots.free, len(house.demote())) == (5, 3)


def test_full_host_memory_takes_as_many_as_are_to_be_ready_once_no_slot_is_free():
    house = House(host_units=4, state_slots=4, demote_ahead=1)
    house.keep_in_host(range(900, 905), 4)
    for first in (0, 100, 200):
        house.serve(range(first, first + 9), 8)
    house.let_all_be_equally_old()
    assert plan(house) == [], "a free slot is as good"
    house.admit(range(800, 805))
    assert [len(house.demote(1)) for _ in range(3)] == [1, 0, 0]
    assert house.reused(range(900, 905)) == 0


def test_full_host_memory_takes_pages_of_a_model_without_states_once_they_run_short():
    house = House(kv_pages=8, has_state=False, host_units=4)
    house.keep_in_host(range(900, 913), 13)
    house.serve(range(15), 15)
    house.let_all_be_equally_old()
    assert plan(house) == []
    house.serve(range(100, 115), 15)
    assert (house.cache.pages.free, len(plan(house))) == (0, 1)
    assert house.reused(range(900, 914)) == 0


def test_what_host_memory_has_no_room_for_is_refused_and_says_so():
    house = House(host_units=4)
    house.serve(CHAT, 10)
    assert plan(house) == []
    assert house.checkpoint(CHAT[:10]).is_refused
    assert house.cache.stats.publish_skipped == {SkipReason.HOST_PINNED: 1}
    assert plan(house) == [], "asked once, not at every step"
    assert house.cache.stats.publish_skipped == {SkipReason.HOST_PINNED: 1}
    house.assert_nothing_held()


def test_what_is_worth_less_than_all_of_host_memory_is_refused_and_says_so():
    house = House(host_units=6)
    house.keep_in_host(range(100, 117), 16)
    house.serve(range(5), 4)
    house.let_all_be_equally_old()
    assert plan(house) == []
    assert house.cache.stats.publish_skipped == {SkipReason.HOST_WORTH_MORE: 1}
    assert house.reused(range(100, 117)) == 16


def test_what_was_refused_is_copied_when_there_is_room_again():
    house = House(host_units=6)
    house.keep_in_host(range(100, 117), 16)
    house.serve(range(5), 4)
    house.let_all_be_equally_old()
    assert plan(house) == []
    house.cache.reset([Tier.HOST])
    assert [prefix_of(d.checkpoint) for d in house.demote()] == [tuple(range(4))]


def test_a_checkpoint_that_is_quarantined_during_its_copy_gets_no_replica(house):
    [demotion] = plan(house)
    lease = house.admit(CHAT)
    house.cache.distrust(lease)
    house.device.run(demotion.copies)
    house.cache.confirm_demotion(demotion, house.tick())
    house.cache.abort(lease, lease.tokens, 0, house.tick())
    house.assert_nothing_held()
    assert house.cache.host.free == house.cache.host.capacity
    assert house.cache.stats.checkpoints_demoted == 0


def test_what_is_copied_stays_on_the_device_until_the_copy_ends():
    house = House(kv_pages=8, state_slots=3, host_units=20)
    house.serve(CHAT, 10)
    [demotion] = plan(house)
    for first in (100, 200, 300):
        house.serve(range(first, first + 11), 10)
    assert house.cache.slots.counts().cached == 2
    house.device.run(demotion.copies)
    house.cache.confirm_demotion(demotion, house.tick())
    house.cache.reset([Tier.DEVICE])
    house.compute(house.admit(CHAT))


def test_a_shared_page_in_host_memory_outlives_one_of_its_two_conversations():
    house = House(host_units=20)
    house.serve((*range(8), 70), 9)
    house.serve((*range(8), 80), 9)
    house.demote()
    house.demote()
    house.cache.reset([Tier.DEVICE])
    one, two = house.checkpoint((*range(8), 70)), house.checkpoint((*range(8), 80))
    page = one.node.host
    assert page is two.node.host
    house.cache.tiers.drop_host(one, LossReason.EVICTED_STATE)
    assert (page.lease.is_open, page.lease.holder.state) == (True, UnitState.CACHED)
    house.assert_sound()
    house.compute(house.admit((*range(8), 80, 81)))
    house.cache.tiers.drop_host(two, LossReason.EVICTED_STATE)
    assert not page.lease.is_open


def test_a_checkpoint_without_a_state_that_is_quarantined_during_its_copy_gets_no_replica():
    house = House(kv_pages=8, has_state=False, host_units=20)
    for first in (0, 100):
        house.serve(range(first, first + 15), 15)
    demotion, _ = plan(house)
    quarantine(house.cache.tiers, demotion.checkpoint, LossReason.RESTORE_FAILED)
    house.cache.confirm_demotion(demotion, house.tick())
    house.assert_sound()
    assert not demotion.checkpoint.is_in_host
    assert all(not page.lease.is_open for page in demotion.pages)


def test_planning_ends_when_what_is_wanted_in_host_memory_finds_no_room_there(monkeypatch):
    """Worth more than the least of what is there, and yet too large for what may leave: asked once, not for ever."""
    cache = ContextCache(CacheOptions(4, 64, 3, has_state=True, host_units=20, host_units_per_state=2))
    for number in range(3):
        prompt = tuple(range(number * 100, number * 100 + 9))
        lease = cache.admit(cache.match(f"r{number}", "n", prompt), 9, (), float(number))
        cache.finish(lease, prompt, 9, float(number))
    asked = []
    monkeypatch.setattr(cache.tiers, "make_host_room", lambda *_: asked.append(1))
    monkeypatch.setattr(cache.tiers, "may_displace_in_host", lambda *_: True)
    assert cache.plan_demotions(10.0, 1000) == []
    assert 1 <= len(asked) <= 4


def test_what_was_superseded_leaves_host_memory_before_the_copy_of_what_is_on_the_device_and_worth_more():
    house = House(state_slots=3, host_units=40, host_state_cap=2)
    house.keep_in_host((*range(8), 99), 8)
    house.serve((*range(16), 99), 16)
    house.demote()
    assert [house.checkpoint(range(size)).is_in_host for size in (8, 16)] == [True, True]
    house.serve((*range(100, 108), 99), 8)
    house.demote()
    assert [house.checkpoint(range(size)).is_in_host for size in (8, 16)] == [False, True]
    assert house.checkpoint(range(100, 108)).is_in_host
