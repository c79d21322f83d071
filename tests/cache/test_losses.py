"""Each token that had to be computed gets one reason."""

from __future__ import annotations

import pytest

from cache import Fault, Frontier, SkipReason
from tests.cache.house import BRANCH, CLOSURE, SHARED, House

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
    house.serve(CHAT, 8)
    house.cache.faults.switch([])
    house.serve((*CHAT, 20, 21), endpoint=True)
    house.cache.tiers.drop_slot(house.checkpoint((*CHAT, 20, 21)), gives_way=True)
    report = house.report((*CHAT, 20, 21, 22), 8)
    assert (report.expected_tokens, report.achievable_tokens) == (8, 13)
    assert report.lost == {"publish_skipped": 8}
