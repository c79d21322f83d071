"""What a plain cache of the same size would have saved: faults do not lower it, a lack of memory does."""

import pytest

from cache import Fault, Frontier, Tier
from tests.cache.house import CLOSURE, SHARED, House


def chat(number, tokens=11):
    return tuple(range(100 * number, 100 * number + tokens))


def expected(house, tokens, **where):
    return house.report(tokens, **where).expected_tokens


def test_a_prompt_that_was_never_seen_is_not_expected_to_save_anything():
    house = House()
    house.serve(chat(1), 10)
    assert expected(house, chat(2)) == 0


def test_what_was_just_computed_is_expected_and_saved():
    house = House()
    house.serve(chat(1), 10)
    report = house.report(chat(1), 10)
    assert (report.expected_tokens, report.cached_tokens) == (10, 10)


@pytest.mark.parametrize("fault", [Fault.REFUSE_PUBLISH, Fault.DROP_STATE])
def test_a_fault_takes_what_was_saved_and_not_what_was_expected(fault):
    house = House()
    house.cache.faults.switch([fault])
    house.serve(chat(1), 10)
    report = house.report(chat(1), 10)
    assert (report.expected_tokens, report.cached_tokens) == (10, 0)
    house.serve((*chat(1), 50, 51), 12)
    assert expected(house, (*chat(1), 50, 51, 52)) == 12, "the next turn too"


def test_slots_that_leak_lower_what_is_saved_and_not_what_is_expected():
    house = House(state_slots=4)
    house.assert_sound = lambda: None
    holder = house.match(chat(7)).holder
    for _ in range(2):
        house.cache.slots.lease(holder, 1)
    for number in range(3):
        house.serve(chat(number), 10)
    assert [expected(house, chat(number)) for number in range(3)] == [10, 10, 10]


def test_more_conversations_than_slots_are_not_expected():
    """One slot of the four is what the request itself runs in."""
    house = House(state_slots=4)
    for number in range(5):
        house.serve(chat(number), 10)
    assert [expected(house, chat(number)) for number in range(5)] == [0, 0, 10, 10, 10]


def test_more_tokens_than_pages_are_not_expected():
    house = House(kv_pages=7)
    for number in range(3):
        house.serve(chat(number), 10)
    assert [expected(house, chat(number)) for number in range(3)] == [0, 10, 10]


def test_what_runs_takes_its_slots_and_pages_from_what_is_expected():
    house = House(state_slots=4)
    for number in range(3):
        house.serve(chat(number), 10)
    house.admit(chat(8))
    house.admit(chat(9))
    house.serve(chat(3), 10)
    assert [expected(house, chat(number)) for number in range(4)] == [0, 0, 0, 10]


@pytest.mark.parametrize(("host_units", "kept"), [(0, 2), (15, 3), (20, 4)])
def test_the_larger_tier_counts(host_units, kept):
    """In host memory a conversation takes three pages and two units for its state."""
    house = House(state_slots=3, host_units=host_units)
    for number in range(5):
        house.serve(chat(number), 10)
    assert sum(expected(house, chat(number)) > 0 for number in range(5)) == kept


def test_a_turn_takes_the_place_of_the_one_before_it():
    house = House(state_slots=3)
    house.serve(chat(1), 10)
    house.serve(chat(1, 15), 14)
    house.serve(chat(1, 19), 18)
    house.serve(chat(2), 10)
    assert (expected(house, chat(1, 21)), expected(house, chat(2))) == (18, 10)
    assert expected(house, (*chat(1), 50)) == 0, "what was superseded would not be there"


def test_a_shared_prefix_outlives_those_who_use_it():
    house = House(state_slots=4)
    system = chat(1, 8)
    for number in range(5):
        house.serve((*system, *chat(number, 6)), Frontier(8, SHARED), 13)
    assert expected(house, (*system, 7, 7, 7)) == 8
    assert [expected(house, (*system, *chat(number, 6))) for number in range(5)] == [8, 8, 8, 13, 13]


def test_pages_that_are_shared_count_once():
    house = House(kv_pages=13, state_slots=8)
    system = chat(1, 32)
    for number in range(4):
        house.serve((*system, *chat(number, 3)), Frontier(32, SHARED), 34)
    assert [expected(house, (*system, *chat(number, 3))) for number in range(4)] == [34, 34, 34, 34]


def test_what_was_left_alone_because_computing_is_quicker_is_no_loss():
    house = House(host_units=40)
    house.keep_in_host(chat(1), 10)
    house.serve(chat(1), 10)
    house.demote()
    house.cache.reset([Tier.DEVICE])
    house.keep_in_host(chat(2), 10)
    costs = house.cache.costs
    costs.saw_restore(1, 100.0, house.now)
    costs.saw_prefill(1000, 1.0, house.now)
    report = house.report(chat(2), 10)
    assert report.cached_tokens == report.expected_tokens == 0


def test_a_reset_ends_every_expectation():
    house = House()
    house.serve(chat(1), 10)
    house.cache.reset()
    assert expected(house, chat(1)) == 0


def test_a_model_without_states_is_bounded_by_its_pages_alone():
    house = House(kv_pages=7, has_state=False)
    for number in range(4):
        house.serve(chat(number), 10)
    assert [expected(house, chat(number)) for number in range(4)] == [0, 0, 10, 10]


def test_what_is_told_of_a_request_once_its_reuse_is_sure():
    told = []
    house = House(host_units=40)
    house.cache._on_reuse = told.append
    house.serve(chat(1), 10)
    house.demote()
    house.cache.reset([Tier.DEVICE])
    told.clear()
    lease = house.admit(chat(1))
    assert told == [], "a restore may still fail"
    house.restore(lease)
    assert told == [lease]


def test_what_lies_ready_and_is_not_found_is_a_loss():
    house = House()
    house.serve(chat(1), 10)
    report = house.cache.report(house.cache.miss("blind", "n", chat(1)), [Frontier(10, CLOSURE)])
    assert (report.expected_tokens, report.cached_tokens) == (10, 0)
