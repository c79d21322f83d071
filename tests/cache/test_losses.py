"""Each token that had to be computed gets one reason, and a rewritten history the place where it was rewritten."""

from __future__ import annotations

import pytest

from cache import Fault, Frontier, LossReason, SkipReason
from tests.cache.house import BRANCH, CLOSURE, ENDPOINT, SHARED, House

CHAT = range(11)


def lost_of(house, tokens, *frontiers):
    return house.report(tokens, *frontiers).lost


def test_what_was_never_seen_is_cold():
    assert lost_of(House(), CHAT, 10) == {"cold": 10}


def test_what_follows_the_last_frontier_of_a_request_is_not_lost():
    assert lost_of(House(), CHAT, 4, 6) == {"cold": 6}
    assert lost_of(House(), CHAT) == {"cold": 10}, "without any frontier, all but the last token"


def test_a_frontier_at_the_prompts_end_does_not_count_for_one_token_is_always_computed():
    assert lost_of(House(), CHAT, 6, 11) == {"cold": 6}


def test_what_is_reused_is_not_lost():
    house = House()
    house.serve(CHAT, 10)
    report = house.report(CHAT, 10)
    assert (report.lost, report.cached_tokens, report.achievable_tokens) == ({}, 10, 10)


def test_a_state_that_gave_way_is_evicted_state():
    house = House(state_slots=1)
    house.serve(CHAT, endpoint=True)
    house.serve(range(100, 111), endpoint=True)
    report = house.report((*CHAT, 50, 51), 12)
    assert report.lost == {"evicted_state": 11, "cold": 1}
    assert (report.cached_tokens, report.achievable_tokens) == (0, 11)


def test_pages_that_gave_way_are_evicted_kv():
    house = House(kv_pages=3)
    house.serve(CHAT, 10)
    house.serve(range(100, 111), 10)
    assert lost_of(house, CHAT, 10) == {"evicted_kv": 10}


def test_pages_of_a_model_without_states_that_gave_way_are_evicted_kv():
    house = House(kv_pages=5, has_state=False)
    house.serve(range(16), 15)
    house.admit(range(100, 111))
    report = house.report(range(16), 15)
    assert (report.cached_tokens, report.achievable_tokens, report.lost) == (8, 15, {"evicted_kv": 7})


def test_what_was_computed_and_is_not_a_frontier_has_no_checkpoint():
    house = House()
    house.serve(range(20), Frontier(4, SHARED), 18)
    assert lost_of(house, (*range(8), *range(70, 76)), 13) == {"no_checkpoint": 4, "cold": 5}


def test_a_frontier_that_was_not_kept_is_publish_skipped():
    house = House()
    house.cache.faults.switch(["refuse_publish"])
    house.serve(CHAT, 10)
    house.cache.faults.switch([])
    assert lost_of(house, CHAT, 10) == {"publish_skipped": 10}


def test_a_frontier_for_which_every_slot_was_in_use_is_publish_skipped():
    house = House(state_slots=1)
    house.serve(CHAT, 10)
    assert house.cache.stats.publish_skipped == {SkipReason.SLOTS_PINNED: 1}
    assert lost_of(house, CHAT, 10) == {"publish_skipped": 10}


def test_a_restore_that_failed_is_restore_failed():
    house = House(host_units=20)
    house.keep_in_host(CHAT, 10)
    house.cache.fail_restore(house.admit(CHAT), house.tick())
    assert lost_of(house, CHAT, 10) == {"restore_failed": 10}


def slow_to_restore(house):
    """A byte takes a second, as long as a thousand tokens."""
    house.cache.costs.saw_restore(1, 1.0, 0.0)
    house.cache.costs.saw_prefill(1000, 1.0, 0.0)


def test_what_is_quicker_to_compute_than_to_restore_is_structural():
    house = House(host_units=20)
    house.keep_in_host(CHAT, 10)
    slow_to_restore(house)
    report = house.report(CHAT, 10)
    assert (report.cached_tokens, report.achievable_tokens, report.lost) == (0, 10, {"structural": 10})


def test_a_frontier_further_up_is_resumed_where_the_restore_would_take_longer():
    house = House(host_units=20)
    house.keep_in_host(range(21), 20)
    house.serve(range(9), 8)
    slow_to_restore(house)
    report = house.report(range(21), 20)
    assert (report.cached_tokens, report.lost) == (8, {"structural": 12})


@pytest.mark.parametrize(("restore_bytes_per_second", "cached"), [(75, 10), (64, 10), (63, 0), (10, 0)])
def test_a_restore_is_chosen_when_it_is_quicker_than_to_compute(restore_bytes_per_second, cached):
    """Three pages of 10 bytes and a state of 25 against 10 tokens at 11.5 a second."""
    house = House(host_units=20)
    house.keep_in_host(CHAT, 10)
    house.cache.costs.saw_restore(restore_bytes_per_second, 1.0, 0.0)
    house.cache.costs.saw_prefill(115, 10.0, 0.0)
    assert house.reused(CHAT) == cached


@pytest.mark.parametrize(("restore_bytes_per_second", "cached"), [(10, 13), (9, 0)])
def test_a_page_of_a_model_without_states_is_restored_when_that_is_quicker(restore_bytes_per_second, cached):
    """A page of 10 bytes against its 4 tokens at 4 a second."""
    house = House(kv_pages=8, has_state=False, host_units=20)
    house.serve(range(13), 13)
    house.serve(range(100, 115), 15)
    house.demote()
    house.cache.reset(["device"])
    house.cache.costs.saw_restore(restore_bytes_per_second, 1.0, 0.0)
    house.cache.costs.saw_prefill(4, 1.0, 0.0)
    report = house.report(range(14), 13)
    assert report.cached_tokens == cached
    assert report.lost == ({} if cached else {"structural": 13})


def test_with_reuse_off_everything_is_bypass():
    house = House(prefix_reuse=False)
    house.serve(CHAT, 10)
    report = house.report(CHAT, 10)
    assert (report.lost, report.achievable_tokens) == ({"bypass": 10}, 0)


def test_several_reasons_add_up():
    house = House(state_slots=3)
    house.serve(range(30), Frontier(4, SHARED), 16)
    house.cache.tiers.drop_slot(house.checkpoint(range(16)))
    report = house.report((*range(16), *range(500, 510)), 24)
    assert report.lost == {"evicted_state": 12, "cold": 8}
    assert report.cached_tokens + sum(report.lost.values()) == 24


def test_a_lost_checkpoint_that_is_published_again_is_lost_no_more():
    house = House()
    house.cache.faults.switch(["drop_state"])
    house.serve(CHAT, 10)
    house.cache.faults.switch([])
    assert lost_of(house, CHAT, 10) == {"evicted_state": 10}
    house.serve(CHAT, 10)
    assert lost_of(house, CHAT, 10) == {}
    assert house.checkpoint(CHAT[:10]).loss is None
    assert len(house.cache.tiers.ghosts) == 0


# -- where a history was rewritten

TURN_1 = (*range(8), 20, 21)
"""System text of 8 tokens, and a question."""
TURN_2 = (*TURN_1, 30, 31, 32, 33, 40, 41)
"""The answer to it, and the next question."""
TURN_3 = (*TURN_2, 50, 51, 52, 53, 60, 61)


@pytest.fixture(params=[True, False], ids=["hybrid", "attention only"])
def chat(request):
    """A conversation of three turns; each prompt ends with one token that opens the answer."""
    house = House(has_state=request.param)
    for turn in (TURN_1, TURN_2, TURN_3):
        house.serve((*turn, 99), Frontier(8, SHARED), len(turn))
    return house


def diverged_at(house, turn):
    return house.report((*turn, 99), 8, len(turn)).diverged_at


@pytest.mark.parametrize(
    "turn",
    [
        pytest.param(TURN_3, id="a retry"),
        pytest.param((*TURN_3, 70, 71, 72, 80, 81), id="the next turn"),
        pytest.param((*range(8), 25, 26), id="another user's question behind the same system text"),
        pytest.param((*range(8), 20, 27, 28, 29, 24), id="and one that begins with the same word"),
        pytest.param((700, 701, 702, 703), id="something else"),
        pytest.param(TURN_2, id="back to an earlier turn"),
    ],
)
def test_what_goes_on_or_begins_anew_rewrites_nothing(chat, turn):
    assert diverged_at(chat, turn) is None


@pytest.mark.parametrize(
    ("turn", "position"),
    [
        pytest.param((*TURN_2[:12], 77, *TURN_2[13:], *TURN_3[16:]), 12, id="an edit deep in an answer"),
        pytest.param((*TURN_2, 88, *TURN_3[16:]), 16, id="a message injected before the last turn"),
        pytest.param((*TURN_1, 30, 31, 90, 91, 92, 93, 94, 95), 12, id="a fork in the second turn"),
        pytest.param((*TURN_2, 54, 55, 56, 57, 62, 63), 16, id="another answer to a turn that has one"),
    ],
)
def test_a_rewritten_history_says_where(chat, turn, position):
    report = chat.report((*turn, 99), 8, len(turn))
    assert report.diverged_at == position
    assert report.lost["diverged"] == len(turn) - position


def test_an_edit_of_a_first_message_counts_when_the_better_half_of_it_is_repeated():
    house = House()
    house.serve((*range(8), *range(20, 30), 99), Frontier(8, SHARED), 18)
    assert diverged_at(house, (*range(8), *range(20, 25), 66, 67, 68)) == 13
    assert diverged_at(house, (*range(8), *range(20, 24), 66, 67, 68)) is None


def test_a_lost_conversation_still_tells_where_it_was_rewritten():
    house = House(state_slots=2)
    for turn in (TURN_1, TURN_2):
        house.serve((*turn, 99), Frontier(8, SHARED), len(turn))
    for checkpoint in tuple(house.cache.tiers.store):
        house.cache.tiers.lose(checkpoint, LossReason.EVICTED_STATE)
    assert diverged_at(house, (*TURN_2[:12], 77, *TURN_2[13:])) == 12


def test_what_is_known_only_up_to_an_endpoint_has_no_turn_to_leave():
    house = House()
    house.serve(range(20), endpoint=True)
    assert house.checkpoint(range(20)).kind is ENDPOINT
    assert diverged_at(house, (*range(15), *range(70, 80))) is None


def test_a_prompt_that_ends_before_the_turn_that_it_left_rewrites_nothing():
    house = House()
    house.serve(range(25), 24)
    assert house.report((*range(16), 70, 71, 72), 16).diverged_at is None


# -- which path a model without states names


def test_a_model_without_states_that_leaves_a_known_path_names_it_a_branch():
    house = House(has_state=False)
    house.serve(CHAT, 10)
    assert house.match((*range(6), 70)).path == BRANCH
    assert house.match((*range(10), 70)).path == CLOSURE


def test_what_was_to_be_expected_has_the_reason_of_what_was_to_be_there():
    """The turn was refused; an endpoint behind it, which nobody promised, was there and gave way."""
    house = House(state_slots=8)
    house.cache.faults.switch([Fault.REFUSE_PUBLISH])
    house.serve(CHAT, 8, endpoint=True)
    house.cache.faults.switch([])
    house.serve((*CHAT, 20, 21), endpoint=True)
    house.cache.tiers.drop_slot(house.checkpoint((*CHAT, 20, 21)))
    report = house.report((*CHAT, 20, 21, 22), 8)
    assert (report.expected_tokens, report.achievable_tokens) == (8, 13)
    assert report.lost == {"publish_skipped": 8}
