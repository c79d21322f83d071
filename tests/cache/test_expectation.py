"""What a plain cache of the same size would have saved: faults do not lower it, a lack of memory does."""

import pytest

from cache import Fault, Frontier, Tier
from cache.matching import Found
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


def test_a_system_prompt_that_one_conversation_alone_uses_takes_no_place_beside_it():
    """Three slots beside the running one: three conversations with a system prompt of their own."""
    house = House(state_slots=4)
    chats = [chat(number, 12) for number in range(3)]
    for turn in (11, 15, 19):
        for number, each in enumerate(chats):
            chats[number] = each = (*each, *chat(10 + turn * 10 + number, 4))
            house.serve(each, Frontier(8, SHARED), turn)
    assert [expected(house, each) for each in chats] == [19, 19, 19]


def test_a_system_prompt_takes_a_place_once_a_second_conversation_uses_it():
    house = House(state_slots=4)
    system = chat(1, 8)
    house.serve((*system, *chat(2, 4)), Frontier(8, SHARED), 11)
    house.serve(chat(4), 10)
    assert expected(house, (*system, 7, 7)) == 0, "its only line takes its place"
    house.serve((*system, *chat(3, 4)), Frontier(8, SHARED), 11)
    assert expected(house, (*system, 7, 7)) == 8
    assert [expected(house, (*system, *chat(number, 4))) for number in (2, 3)] == [8, 11], "three places, not four"
    assert expected(house, chat(4)) == 10


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


# -- faults of the cache's own


def owed(house, tokens, **where):
    report = house.report(tokens, **where)
    return report.expected_tokens, report.fault_tokens


def fill(house, count=6, first=20):
    """So many other conversations, more than a plain cache would have kept beside what was there before."""
    for number in range(first, first + count):
        house.serve(chat(number), 10)


@pytest.mark.parametrize("fault", [Fault.REFUSE_PUBLISH, Fault.DROP_STATE])
def test_what_was_lost_without_need_is_owed_whatever_a_plain_cache_would_have_kept(fault):
    house = House(state_slots=4)
    house.cache.faults.switch([fault])
    house.serve(chat(1), 10)
    house.cache.faults.switch([])
    fill(house)
    assert owed(house, chat(1)) == (10, 10)
    house.serve(chat(2), 10)
    fill(house, first=40)
    assert owed(house, chat(2)) == (0, 0), "what gave way to others is no fault"


def test_what_gave_way_before_and_is_refused_now_is_a_fault():
    house = House(state_slots=2)
    house.serve(chat(1), 10)
    fill(house)
    assert owed(house, chat(1)) == (0, 0)
    house.cache.faults.switch([Fault.REFUSE_PUBLISH])
    house.serve(chat(1), 10)
    house.cache.faults.switch([])
    fill(house)
    assert owed(house, chat(1)) == (10, 10)


def test_an_old_frontier_that_is_found_pays_for_a_part_of_what_is_owed():
    house = House()
    house.serve(chat(1), 10)
    house.cache.faults.switch([Fault.REFUSE_PUBLISH])
    house.serve(chat(1, 15), 14)
    report = house.report(chat(1, 17))
    assert (report.cached_tokens, report.expected_tokens, report.fault_tokens) == (10, 14, 4)


def test_a_turn_that_was_refused_is_owed_no_more_once_a_later_one_was_kept_and_gave_way():
    house = House(state_slots=2)
    house.cache.faults.switch([Fault.REFUSE_PUBLISH])
    house.serve(chat(1), 10)
    house.cache.faults.switch([])
    house.serve(chat(1, 15), 14)
    fill(house)
    assert owed(house, chat(1, 17)) == (0, 0)


def test_a_frontier_for_which_requests_left_no_slot_is_no_fault_but_one_for_which_nobody_knows_who_has_it_is():
    for leaked, faults in ((0, 0), (1, 8)):
        house = House(state_slots=2)
        house.assert_sound = lambda: None
        others = [house.admit(chat(9))] if not leaked else []
        house.cache.slots.lease(house.match(chat(7)).holder, leaked)
        house.serve(chat(1), 8)
        for each in others:
            house.cache.abort(each, each.tokens, 0, house.now)
        assert house.report(chat(1)).fault_tokens == faults


def test_a_copy_that_fails_is_a_fault():
    house = House(host_units=40)
    house.keep_in_host(chat(1), 10)
    lease = house.admit(chat(1))
    house.cache.fail_restore(lease, house.tick())
    fill(house, 9)
    assert owed(house, chat(1)) == (10, 10)


@pytest.mark.parametrize("has_state", [True, False])
def test_what_lies_ready_and_is_not_found_is_a_fault_but_not_where_there_is_no_room_for_it(has_state):
    house = House(has_state=has_state)
    house.serve(chat(1), 8)
    cache = house.cache
    missed = cache.miss("r", "n", chat(1))
    assert cache.report(missed, []).fault_tokens == 0
    cache.release(missed)
    find = cache._find
    cache._find = lambda namespace, tokens: Found(known=find(namespace, tokens).known)
    assert house.report(chat(1)).fault_tokens == 8


@pytest.mark.parametrize(("restore_bytes_per_second", "faults"), [(1000.0, 10), (0.01, 0)])
def test_what_host_memory_has_and_is_not_found_is_a_fault_where_to_copy_it_is_quicker(restore_bytes_per_second, faults):
    house = House(host_units=40)
    house.keep_in_host(chat(1), 10)
    cache = house.cache
    cache.costs.saw_restore(int(restore_bytes_per_second * 100), 100.0, house.now)
    cache.costs.saw_prefill(100, 100.0, house.now)
    find = cache._find
    cache._find = lambda namespace, tokens: Found(known=find(namespace, tokens).known)
    assert house.report(chat(1)).fault_tokens == faults


def test_what_a_full_pool_gives_up_for_others_is_no_fault():
    """On the device, for its slot or its pages, and in host memory."""
    for sizes in (
        {"state_slots": 3},
        {"kv_pages": 7},
        {"state_slots": 3, "host_units": 11},
        {"has_state": False, "kv_pages": 7},
    ):
        house = House(**sizes)
        for number in range(8):
            house.serve(chat(number), 10)
            house.demote()
        lost = [house.report(chat(number)) for number in range(8)]
        assert sum(each.cached_tokens < 10 for each in lost) > 3
        assert [each.fault_tokens for each in lost] == [0] * 8
