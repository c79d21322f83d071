"""Two tiers: what comes back from host memory and how, who gives way in each, and what a copy that fails costs."""

from __future__ import annotations

import pytest

from cache import (
    CopyObject,
    Frontier,
    Holder,
    LossReason,
    PoolExhaustedError,
    Tier,
    UnitHandle,
    UnitState,
    check,
    heal,
)
from tests.cache.house import ALL_READY, CLOSURE, SHARED, House, prefix_of

KV, STATE = CopyObject.KV_PAGE, CopyObject.STATE
CHAT = range(11)
"""Resumed at its turn's end, 10: two full pages, two tokens of a third, and a state."""
OTHER = range(100, 111)


@pytest.fixture
def house():
    house = House(host_units=20)
    house.keep_in_host(CHAT, 10)
    return house


def test_a_restore_copies_each_page_and_the_state_to_where_the_request_will_look(house):
    kept = house.checkpoint(range(10))
    lease = house.admit(CHAT)
    assert [(c.what, c.source.tier) for c in lease.restore] == [(KV, Tier.HOST)] * 3 + [(STATE, Tier.HOST)]
    assert [c.destination for c in lease.restore[:3]] == [UnitHandle(Tier.DEVICE, (u,)) for u in lease.page_units]
    assert lease.restore[3].destination == UnitHandle(Tier.DEVICE, (lease.state_unit,))
    assert lease.restore[3].source.units == kept.host_state.units
    assert len(kept.host_state) == 2
    assert lease.resume == ()


def test_what_was_restored_is_what_a_cold_run_computes(house):
    lease = house.admit(CHAT)
    house.compute(lease)
    house.cache.finish(lease, lease.tokens, 11, house.tick())
    house.assert_nothing_held()


def test_a_restore_counts_as_host_tokens_once_it_is_confirmed(house):
    lease = house.admit(CHAT)
    assert lease.report.source == {"device": 0, "host": 10, "disk": 0}
    assert house.cache.stats.reused_tokens == 0
    house.restore(lease)
    assert house.cache.stats.reused_from == {"device": 0, "host": 10, "disk": 0}
    assert (house.cache.stats.restores, lease.is_restoring) == (1, False)


def test_pages_that_are_still_on_the_device_are_not_copied(house):
    house.serve((*range(8), *OTHER), 12)
    lease = house.admit(CHAT)
    assert [c.what for c in lease.restore] == [KV, STATE]
    assert lease.report.source == {"device": 0, "host": 10, "disk": 0}, "without its state none of it could be reused"


def test_what_both_tiers_have_is_resumed_from_the_device():
    house = House(host_units=20)
    house.serve(CHAT, 10)
    house.demote()
    lease = house.admit(CHAT)
    assert (lease.restore, [c.what for c in lease.resume]) == ((), [KV, STATE])
    assert lease.report.source == {"device": 10, "host": 0, "disk": 0}


def test_what_was_restored_and_captured_again_is_on_the_device_again(house):
    lease = house.serve((*CHAT, *range(50, 55)), 10, 15)
    assert lease.report.source["host"] == 10
    assert house.reused((*CHAT, *range(50, 55))) == 15
    assert not house.checkpoint((*CHAT, *range(50, 54))).is_in_host


def test_a_restore_that_fails_is_served_from_the_root_and_leaves_everything_else_alone(house):
    house.keep_in_host(OTHER, 10)
    house.keep_in_host(CHAT, 10)
    free = (house.cache.pages.free, house.cache.slots.free)
    lease = house.admit(CHAT)
    house.device.spoil(lease.restore)
    house.cache.fail_restore(lease, house.tick())
    house.cache.fail_restore(lease, house.tick())
    house.assert_nothing_held()
    assert (house.cache.pages.free, house.cache.slots.free) == free
    assert house.reused(OTHER) == 10
    assert (house.cache.stats.restore_failures, house.cache.stats.quarantined) == (1, 1)

    again = house.cache.admit(house.cache.miss(lease.request_id, "n", tuple(CHAT)), 12, [], house.tick())
    assert (again.cached_tokens, again.report.lost) == (0, {"restore_failed": 10})
    house.compute(again)


def test_a_request_that_leaves_while_it_restores_holds_nothing(house):
    lease = house.admit(CHAT)
    house.cache.abort(lease, lease.tokens, 0, house.tick())
    house.assert_nothing_held()
    assert (house.reused(CHAT), house.cache.stats.reused_tokens) == (10, 0)


def test_a_failed_restore_of_a_model_without_states_takes_out_all_that_stands_on_the_page():
    house = House(kv_pages=8, has_state=False, host_units=40)
    one, two, apart = (*range(12), 70), (*range(12), 80), range(100, 113)
    for number, tokens in enumerate((one, two, apart)):
        house.serve(tokens, 13)
        filler = 1000 * (number + 1)
        house.serve(range(filler, filler + 15), 15)
        house.demote()
        house.cache.reset([Tier.DEVICE])
    assert [house.reused((*tokens, 0)) for tokens in (one, two, apart)] == [13, 13, 13]
    lease = house.admit((*one, 0))
    house.device.spoil(lease.restore)
    house.cache.fail_restore(lease, house.tick())
    house.assert_nothing_held()
    assert house.report((*two, 0), 13).lost == {"restore_failed": 13}
    assert house.reused((*apart, 0)) == 13


def test_what_a_device_copy_backs_yields_host_room_to_what_nothing_backs():
    house = House(host_units=10)
    house.keep_in_host(CHAT, 10)
    house.serve(OTHER, 10)
    house.demote()
    house.serve(range(200, 208), 7)
    house.let_all_be_equally_old()
    assert house.cache.host.free == 0
    assert [prefix_of(d.checkpoint) for d in house.demote(1)] == [tuple(range(200, 207))]
    assert not house.checkpoint(OTHER[:10]).is_in_host
    assert [house.reused(tokens) for tokens in (CHAT, OTHER, range(200, 208))] == [10, 10, 7]


def test_host_memory_gives_up_what_is_worth_least_of_what_only_it_has():
    house = House(host_units=11)
    house.keep_in_host(range(9), 8)
    house.keep_in_host(range(100, 117), 16)
    house.serve(range(200, 213), 12)
    house.let_all_be_equally_old()
    assert house.cache.host.free == 1
    house.demote()
    assert [prefix_of(c)[0] for c in house.cache.tiers.store if c.is_in_host] == [100, 200]
    assert house.checkpoint(range(8)).loss is LossReason.EVICTED_STATE
    assert house.cache.stats.evictions["host_units", CLOSURE] == 1


def test_no_more_states_are_in_host_memory_than_the_cap_allows():
    house = House(host_units=40, host_state_cap=2)
    for first in (0, 100, 200, 300):
        house.serve(range(first, first + 9), 8)
        house.demote()
        assert house.cache.tiers.host_states <= 2
    assert house.cache.tiers.host_states == 2


def test_a_superseded_turn_is_copied_to_free_host_memory_and_drives_out_nothing():
    house = House(host_units=4, demote_ahead=ALL_READY)
    house.keep_in_host(OTHER[:9], 8)
    house.serve(range(9), 8)
    house.serve(range(13), 12)
    assert house.checkpoint(range(8)).is_superseded
    assert not house.cache.tiers.make_host_room(4, 1, house.checkpoint(range(8)))
    assert house.reused(OTHER[:9]) == 8


@pytest.mark.parametrize(("pages", "evicted"), [(1, 0), (2, 1), (3, 1), (4, 2), (11, 5)])
def test_one_admission_evicts_in_proportion_to_its_need(pages, evicted):
    house = House(kv_pages=21, state_slots=20)
    for number in range(10):
        house.serve(range(100 * number, 100 * number + 9), 8)
    assert house.cache.pages.free == 1
    house.admit(range(5000, 5000 + 4 * pages - 1))
    assert house.cache.stats.evictions["device_kv_pages", CLOSURE] == evicted
    assert len(house.cache.tiers.store) == 10 - evicted


def test_a_model_without_states_gives_up_page_by_page_from_the_end():
    house = House(kv_pages=6, has_state=False)
    house.serve(range(18), 18)
    kept = []
    for needed in (4, 8, 12, 16, 20, 24):
        lease = house.admit(range(900, 900 + needed - 1))
        house.cache.abort(lease, lease.tokens, 0, house.tick())
        kept.append(house.reused(range(19)))
        house.assert_sound()
    assert kept == [18, 16, 12, 8, 4, 0]
    assert house.report(range(19), 18).lost == {"evicted_kv": 18}


def test_a_state_whose_pages_left_the_device_is_dropped_with_them_unless_host_memory_has_it():
    house = House(kv_pages=6, state_slots=4, host_units=20)
    house.serve(CHAT, 10)
    house.demote()
    house.admit(range(900, 919))
    kept = house.checkpoint(range(10))
    assert (kept.is_in_host, kept.device_node.depth, kept.tail_page) == (True, 1, None)
    assert house.reused(CHAT) == 10


def test_running_requests_and_copies_are_not_counted_as_room():
    house = House(kv_pages=4, host_units=20)
    house.serve(range(9), 8)
    [demotion] = house.cache.plan_demotions(house.tick(), 1)
    match = house.match(range(500, 511))
    assert house.cache.admit(match, 12, [], house.tick()) is None
    house.cache.cancel_demotion(demotion)
    assert house.admit(range(500, 511)).page_units
    house.assert_sound()


def test_a_slot_is_taken_from_what_is_worth_least():
    house = House(state_slots=2)
    house.serve(range(21), 20)
    house.serve(range(100, 106), 5)
    house.serve(range(200, 221), 20)
    assert [house.reused(range(first, first + 21)) for first in (0, 200)] == [0, 20]


def test_what_a_checkpoint_saves_is_counted_from_the_ancestor_that_survives():
    house = House()
    house.serve(range(21), Frontier(12, SHARED), 20)
    child, parent = house.checkpoint(range(20)), house.checkpoint(range(12))
    assert (child.benefit_tokens, parent.benefit_tokens) == (8, 12)
    house.cache.tiers.drop_slot(parent)
    assert house.cache.tiers.refresh(child)
    assert child.benefit_tokens == 20
    assert not house.cache.tiers.refresh(child)


def test_a_state_that_left_the_device_is_restored_to_pages_that_stayed():
    house = House(host_units=20)
    house.serve(CHAT, 10)
    house.demote()
    house.cache.tiers.drop_slot(house.checkpoint(CHAT[:10]))
    lease = house.admit(CHAT)
    assert ([c.what for c in lease.restore], [c.what for c in lease.resume]) == ([STATE], [KV])
    house.compute(lease)
    house.cache.abort(lease, lease.tokens, 0, house.tick())
    house.assert_nothing_held()


def test_host_memory_keeps_what_is_worth_more_than_the_candidate_at_the_cost_of_a_copy_that_is_worth_less():
    house = House(host_units=11)
    house.keep_in_host(range(17), 16)
    house.serve(range(100, 105), 4)
    house.demote()
    house.serve(range(200, 213), 12)
    house.let_all_be_equally_old()
    assert house.cache.host.free == 2
    assert [prefix_of(d.checkpoint)[0] for d in house.demote()] == [200]
    assert house.reused(range(17)) == 16
    refused = house.checkpoint(range(100, 104))
    assert (refused.is_in_host, refused.is_refused, house.reused(range(100, 105))) == (False, True, 4)


def test_what_lost_its_ancestor_in_host_memory_is_worth_more_than_before():
    house = House(host_units=7)
    house.keep_in_host(range(13), Frontier(4, SHARED), 12)
    house.demote()
    house.keep_in_host(range(13), Frontier(4, SHARED), 12)
    parent, child = house.checkpoint(range(4)), house.checkpoint(range(12))
    assert (parent.is_in_host, child.is_in_host, child.benefit_tokens) == (True, True, 8)
    house.cache.tiers.drop_host(parent, LossReason.EVICTED_STATE)
    house.serve(range(100, 111), 10)
    house.let_all_be_equally_old()
    assert house.demote() == []
    assert (child.is_in_host, child.benefit_tokens) == (True, 12)


def test_a_slot_that_nobody_can_give_is_refused_and_nothing_is_taken():
    house = House(state_slots=1)
    house.admit(range(5))
    with pytest.raises(PoolExhaustedError, match="'device_state_slots': 1 units wanted, 0 free"):
        house.cache.tiers.take_slot(Holder(UnitState.PINNED, "another"), "n")
    house.assert_sound()


def test_pages_that_nobody_can_give_stay_where_they_are():
    house = House(kv_pages=4)
    house.serve(range(5), 4)
    house.admit(range(100, 105))
    house.cache.tiers.free_pages(4, "n")
    assert house.cache.pages.free == 2
    house.assert_sound()


def test_a_checkpoint_that_is_computed_again_keeps_the_state_that_it_still_has():
    house = House(kv_pages=12, host_units=20)
    house.serve(CHAT, endpoint=True)
    house.demote()
    kept = house.checkpoint(CHAT)
    house.cache.tiers.shrink(kept, 2)
    slot = kept.slot
    assert (slot.is_open, kept.is_whole_on_device) == (True, False)
    house.serve(CHAT, endpoint=True)
    assert (kept.slot is slot, kept.is_whole_on_device, kept.is_in_host) == (True, True, True)
    assert house.cache.slots.free == house.cache.slots.capacity - 1


def test_a_candidate_that_is_refused_in_the_end_costs_host_memory_nothing():
    house = House(host_units=11, state_slots=8)
    house.keep_in_host(range(9), 8)
    house.keep_in_host(range(100, 117), 16)
    house.serve(range(200, 221), Frontier(8, SHARED), 20)
    house.let_all_be_equally_old()
    candidate = house.checkpoint(range(200, 220))
    assert candidate.benefit_tokens == 12, "worth more than the first, less than the second"
    assert not house.cache.tiers.make_host_room(7, 1, candidate)
    assert [house.reused(tokens) for tokens in (range(9), range(100, 117))] == [8, 16]
    house.assert_sound()


def test_pages_that_leaked_make_requests_wait_and_break_nothing():
    house = House(kv_pages=6)
    house.serve(range(11), 10)
    house.cache.pages.lease(Holder(UnitState.CACHED, "leaked"), 3)
    match = house.match(range(100, 117))
    assert house.cache.admit(match, 18, (), house.tick()) is None
    lease = house.cache.admit(house.match(range(200, 207)), 8, (), house.tick())
    assert lease is not None
    assert not house.cache.grow(lease, 20)
    assert not [each for each in check(house.cache) if "leaked" not in each]
    assert heal(house.cache)["device_kv_pages"] == 3
    assert house.cache.grow(lease, 20)
