"""The scheduler while copies to and from host memory are under way over many steps: nobody uses what they have not
brought, nor what they still write."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

from cache import CopyObject, Tier
from engine.sequence import SequenceState
from tests.engine.house import House
from tests.engine.late_device import LateDevice
from tests.engine.test_host_tier import CACHED, COPIES, PROMPT, house_of_old, limits_of, restores, state_of
from tests.engine.test_scheduler_histories import SchedulerMachine


def late(house: House) -> House:
    """From now on its copies end when `house.device.pace` says so."""
    device = LateDevice(house.cache)
    device.pages, device.slots, device.host = house.device.pages, house.device.slots, house.device.host
    house.device = device
    return house


def busy_house(**options) -> House:
    """One in which a request decodes while another is restored."""
    house = late(house_of_old(**options))
    house.submit("busy", range(900, 905), max_tokens=40)
    house.step()
    house.submit("new", PROMPT)
    return house


def begin_restore(house: House) -> int:
    """The number of its only batch."""
    plan = house.step()
    assert restores(plan) == [COPIES]
    return plan.background[0].number


def test_steps_go_on_while_a_restore_is_under_way_and_it_is_not_begun_again():
    house = busy_house()
    number = begin_restore(house)
    for _ in range(3):
        plan = house.step()
        assert ([each.request_id for each in plan.segments], restores(plan)) == (["busy"], [])
        assert number in plan.under_way
    house.device.pace = 1
    house.step()
    plan = house.step()
    assert (number in plan.under_way, len(plan.segments)) == (False, 2)
    house.run_on()
    assert house.reuse("new").cached_tokens == CACHED
    assert house.outputs["new"] == [1020]


def test_what_is_under_way_counts_against_what_a_step_may_copy():
    house = busy_house()
    house.scheduler.limits = limits_of(house, copy_bytes=2)
    assert restores(house.step()) == [2]
    assert not house.step().background
    house.device.pace = 1
    house.step()
    assert restores(house.step()) == [2]


def test_a_step_of_copies_alone_is_planned_for_what_is_under_way():
    house = late(house_of_old())
    house.submit("busy", range(900, 905), max_tokens=2)
    house.submit("new", PROMPT)
    plans = [house.step() for _ in range(3)]
    assert "busy" in house.ended
    plan = house.plan()
    assert (plan.segments, restores(plan)) == ((), [])
    assert plans[0].background[0].number in plan.under_way
    house.run_on()
    assert house.outputs["new"] == [1020]


def test_a_demotion_under_way_keeps_its_pages_its_slot_and_its_units():
    house = late(House(spare_slots=1, host_units=60))
    house.run("a", PROMPT)
    house.submit("busy", range(900, 905), max_tokens=40)
    for _ in range(40):
        if house.scheduler.copies.under_way:
            break
        house.step()
    (demotion,) = house.cache.demotions.under_way
    cache = house.cache
    pools = {CopyObject.KV_PAGE: cache.pages, CopyObject.STATE: cache.slots}
    held = {(pools[copy.what].name, copy.source.unit) for copy in demotion.copies}
    held |= {(cache.host.name, unit) for copy in demotion.copies for unit in copy.destination.units}
    assert {name for name, _ in held} == {cache.pages.name, cache.slots.name, cache.host.name}
    for number in range(5):
        house.submit(f"next{number}", range(300 + 40 * number, 320 + 40 * number))
        house.step()
        assert house.scheduler.copies.under_way
        all_pools = (*pools.values(), cache.host)
        assert held <= {(pool.name, unit) for pool in all_pools for lease in pool.leases() for unit in lease.units}


def test_a_request_that_leaves_while_its_restore_is_under_way_leaves_its_pages_to_others():
    house = busy_house()
    number = begin_restore(house)
    assert state_of(house, "new") is SequenceState.RESTORING
    house.scheduler.cancel("new", house.now)
    assert number not in house.plan().under_way
    assert number in house.device.under_way
    house.submit("next", range(300, 330))
    house.run_on()
    assert house.outputs["next"] == [1030]


def test_a_step_that_fails_has_restores_begun_again_and_demotions_called_off():
    house = busy_house()
    house.step()
    plan = house.plan()
    house.device.spoil(plan)
    house.device.abandon()
    assert [each.request_id for each in house.scheduler.fail(plan, house.now)] == ["busy"]
    assert not house.scheduler.copies.under_way
    assert restores(house.plan()) == [COPIES]
    house.run_on()
    assert house.reuse("new").cached_tokens == CACHED


@pytest.mark.parametrize("seed", range(8))
def test_whoever_comes_and_goes_while_copies_are_under_way_computes_on_what_is_its_own(seed):
    chance, prompts = Random(seed), [range(start, start + 20) for start in (0, 100, 200)]
    house = late(house_of_old(*prompts, pages=24, host_units=300, copy_bytes=3))
    given_up = 0
    for number in range(150):
        house.device.pace = chance.choice([0, 0, 1, 2])
        if chance.random() < 0.2:
            house.cache.reset([Tier.DEVICE])
        if len(house.scheduler.running) + len(house.scheduler.waiting) < 4:
            house.submit(f"r{number}", chance.choice([*prompts, range(900 + number, 930 + number)]), max_tokens=3)
        for each in house.scheduler.running:
            if each.state is SequenceState.RESTORING and chance.random() < 0.3:
                house.scheduler.cancel(each.request_id, house.now)
        house.step()
        given_up += len(house.device.given_up_restores)
    house.run_on()
    assert given_up > 3, "the history has too little in it"


class LateMachine(SchedulerMachine):
    """The same histories; how many batches end with a step changes now and then."""

    def new_device(self):
        return LateDevice(self.cache)

    @rule(batches=st.integers(0, 3))
    def go_on_at_another_pace(self, batches):
        self.device.pace = batches


LateMachine.TestCase.settings = settings(
    max_examples=25,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    report_multiple_bugs=False,
)
TestLateHistories = LateMachine.TestCase
