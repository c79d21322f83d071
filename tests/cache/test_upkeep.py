"""What an operator or a fault does: resets while traffic runs, quarantine, fire drills."""

from __future__ import annotations

import pytest

from cache import Fault, Faults, Frontier, LossReason, ResetCounts, SkipReason, Tier, UnitState, host_state_counts
from tests.cache.house import ANCHOR, CLOSURE, House

CHAT = range(11)
OTHER = range(100, 111)


@pytest.fixture
def house():
    """CHAT in host memory alone, OTHER in both tiers."""
    house = House(host_units=20)
    house.keep_in_host(CHAT, 10)
    house.serve(OTHER, 10)
    house.demote()
    return house


def tiers_of(house, tokens):
    found = house.cache.retention.find("n", tuple(tokens[:10]))
    return None if found is None else (found.slot is not None, found.is_in_host)


@pytest.mark.parametrize(
    ("tiers", "counts", "chat", "other"),
    [
        ([Tier.DEVICE], {Tier.DEVICE: ResetCounts(1)}, (False, True), (False, True)),
        ([Tier.HOST], {Tier.HOST: ResetCounts(2)}, None, (True, False)),
        ([Tier.DEVICE, Tier.HOST], {Tier.DEVICE: ResetCounts(1), Tier.HOST: ResetCounts(2)}, None, None),
        ([Tier.DISK], {Tier.DISK: ResetCounts()}, (False, True), (True, True)),
        ([], {}, (False, True), (True, True)),
    ],
)
def test_a_reset_drops_from_each_tier_that_was_asked_for(house, tiers, counts, chat, other):
    assert house.cache.reset(tiers) == counts
    assert (tiers_of(house, CHAT), tiers_of(house, OTHER)) == (chat, other)
    house.assert_nothing_held()


def test_after_a_reset_everything_is_cold_and_every_unit_free(house):
    house.cache.tiers.lose(house.checkpoint(OTHER[:10]), LossReason.EVICTED_STATE)
    house.cache.reset()
    assert house.report(CHAT, 10).lost == house.report(OTHER, 10).lost == {"cold": 10}
    assert all(pool.free == pool.capacity for pool in (house.cache.pages, house.cache.slots, house.cache.host))
    assert house.cache.tiers.ghosts.trees == {}


def test_a_reset_of_host_memory_alone_keeps_what_was_lost_before_in_mind(house):
    house.cache.tiers.lose(house.checkpoint(OTHER[:10]), LossReason.EVICTED_STATE)
    house.cache.reset([Tier.HOST])
    assert house.report(OTHER, 10).lost == {"evicted_state": 10}


def test_a_reset_leaves_what_a_request_is_restored_from(house):
    lease = house.admit(CHAT)
    assert house.cache.reset() == {Tier.DEVICE: ResetCounts(1), Tier.HOST: ResetCounts(1, pinned=1)}
    house.assert_sound()
    house.compute(lease)
    house.cache.finish(lease, lease.tokens, 11, house.tick())
    house.assert_nothing_held()
    assert house.cache.reset() == {Tier.DEVICE: ResetCounts(1), Tier.HOST: ResetCounts(1)}


def test_a_reset_during_a_demotion_leaves_what_is_copied():
    house = House(host_units=20)
    house.serve(CHAT, 10)
    [demotion] = house.cache.plan_demotions(house.tick(), 1)
    assert house.cache.reset() == {Tier.DEVICE: ResetCounts(pinned=1), Tier.HOST: ResetCounts()}
    house.device.run(demotion.copies)
    house.cache.confirm_demotion(demotion, house.tick())
    house.assert_nothing_held()
    assert tiers_of(house, CHAT) == (True, True)


def test_what_is_quarantined_while_it_is_read_is_found_by_nobody_and_goes_with_its_last_reader(house):
    first, second = house.admit(CHAT), house.admit(CHAT)
    house.cache.fail_restore(first, house.tick())
    house.assert_sound()
    assert house.reused(CHAT) == 0
    assert house.cache.stats.quarantined == 1
    assert house.report(CHAT, 10).lost == {"restore_failed": 10}
    state = second.restore[-1].source
    assert [lease.units for lease in house.cache.host.leases()].count(state.units) == 1
    house.compute(second)
    assert state.units not in [lease.units for lease in house.cache.host.leases()]
    house.assert_sound()


def test_what_a_request_was_resumed_from_can_be_distrusted_once(house):
    lease = house.admit(OTHER)
    house.compute(lease)
    house.cache.abort(lease, lease.tokens, 0, house.tick())
    for _ in range(2):
        house.cache.distrust(lease)
    house.assert_nothing_held()
    assert house.cache.stats.quarantined == 1
    assert house.report(OTHER, 10).lost == {"restore_failed": 10}
    assert house.reused(CHAT) == 10


def test_a_request_that_was_resumed_from_nothing_distrusts_nothing(house):
    lease = house.admit(range(500, 510))
    house.cache.distrust(lease)
    assert house.cache.stats.quarantined == 0


def test_what_was_lost_meanwhile_is_not_quarantined(house):
    lease = house.admit(OTHER)
    house.compute(lease)
    house.cache.tiers.lose(lease.origin, LossReason.EVICTED_STATE)
    house.cache.distrust(lease)
    assert house.cache.stats.quarantined == 0
    assert house.report(OTHER, 10).lost == {"evicted_state": 10}


# -- fire drills


def test_faults_are_known_by_name_and_switched_together():
    faults = Faults(["restore_fail"])
    assert Fault.RESTORE_FAIL in faults
    faults.switch(["step_fail", "slow_step"])
    assert faults.on == {Fault.STEP_FAIL, Fault.SLOW_STEP}
    with pytest.raises(ValueError, match="no_such_fault"):
        faults.switch(["no_such_fault"])
    assert faults.on == {Fault.STEP_FAIL, Fault.SLOW_STEP}


def test_refused_publishes_are_counted_and_leave_nothing():
    house = House()
    house.cache.faults.switch(["refuse_publish"])
    house.serve(CHAT, 10, endpoint=True)
    assert house.cache.stats.publish_skipped == {SkipReason.FAULT: 2}
    assert len(house.cache.tiers.store) == 0
    assert house.cache.slots.free == house.cache.slots.capacity


def test_a_dropped_state_leaves_a_ghost_and_no_unit():
    house = House()
    house.cache.faults.switch(["drop_state"])
    house.serve(CHAT, 10)
    assert house.checkpoint(CHAT[:10]).loss is LossReason.EVICTED_STATE
    assert house.cache.slots.free == house.cache.slots.capacity
    assert house.cache.pages.free == house.cache.pages.capacity


def test_a_leaked_host_state_keeps_its_units_and_nobody_refers_to_them():
    house = House(host_units=20)
    house.keep_in_host(CHAT, 10)
    house.cache.faults.switch(["leak_host_state"])
    house.cache.reset([Tier.HOST])
    [orphan] = house.cache.host.leases()
    assert (len(orphan), orphan.holder.state) == (2, UnitState.CACHED)
    assert house.cache.tiers.host_states == 1


# -- state images in host memory, as the metrics count them


def test_host_states_are_cached_pinned_and_in_flight(house):
    assert host_state_counts(house.cache).capacity == 10
    house.serve(range(200, 211), 10)
    house.cache.plan_demotions(house.tick(), 1)
    match, lease = house.match(CHAT), house.admit(CHAT)
    counts = host_state_counts(house.cache)
    assert (counts.free, counts.cached, counts.pinned, counts.in_flight) == (7, 1, 1, 1)
    house.cache.release(match)
    house.compute(lease)
    counts = host_state_counts(house.cache)
    assert (counts.free, counts.cached, counts.pinned, counts.in_flight) == (7, 2, 0, 1)


@pytest.mark.parametrize(("cap", "capacity"), [(None, 10), (4, 4), (40, 10), (0, 0)])
def test_a_cap_on_host_states_is_their_capacity(cap, capacity):
    assert host_state_counts(House(host_units=20, host_state_cap=cap).cache).capacity == capacity


def test_a_model_without_states_has_none_in_host_memory():
    assert host_state_counts(House(host_units=20, has_state=False).cache).capacity == 0


# -- a request's exits


def test_whatever_is_closed_late_or_twice_changes_nothing(house):
    lease = house.admit(OTHER, [Frontier(4, ANCHOR)])
    house.compute(lease)
    ticket = house.cache.capture(lease, Frontier(6, CLOSURE))
    house.cache.abort(lease, lease.tokens, 0, house.tick())
    before = house.cache.slots.counts()
    house.cache.publish(ticket, house.tick())
    house.cache.discard(ticket)
    house.cache.finish(lease, lease.tokens, 11, house.tick())
    house.cache.fail_restore(lease, house.tick())
    assert house.cache.slots.counts() == before
    assert house.cache.retention.find("n", tuple(OTHER[:6])) is None
    house.assert_nothing_held()


def test_a_request_cannot_hold_two_matches_nor_be_admitted_by_a_closed_one(house):
    match = house.match(OTHER)
    with pytest.raises(ValueError, match=f"request '{match.request_id}' holds a match or a lease already"):
        house.cache.match(match.request_id, "n", tuple(OTHER))
    house.cache.release(match)
    house.cache.release(match)
    with pytest.raises(ValueError, match="is closed"):
        house.cache.admit(match, 12, [], house.tick())
    house.assert_nothing_held()
