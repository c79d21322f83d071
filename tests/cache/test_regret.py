"""When a plain cache would do better, its rule is followed; and no longer than it proves itself."""

from __future__ import annotations

import pytest

from cache.regret import Regret
from cache.types import LossReason
from tests.cache.house import House

LOST_TO_PLAIN = {"cached_tokens": 0, "plain_tokens": 10, "achievable_tokens": 10, "held_tokens": 80}
BOTH_HAVE_IT = {**LOST_TO_PLAIN, "cached_tokens": 10}
WON_OVER_PLAIN = {**BOTH_HAVE_IT, "plain_tokens": 0}
NEITHER_HAS_IT = {**LOST_TO_PLAIN, "plain_tokens": 0}


@pytest.mark.parametrize(
    ("seen", "is_due"),
    [
        ([LOST_TO_PLAIN], False),
        ([LOST_TO_PLAIN] * 2, True),
        ([LOST_TO_PLAIN, BOTH_HAVE_IT, LOST_TO_PLAIN], True),
        ([LOST_TO_PLAIN, WON_OVER_PLAIN, LOST_TO_PLAIN], False),
        ([LOST_TO_PLAIN] * 9 + [BOTH_HAVE_IT] * 99, True),
        ([LOST_TO_PLAIN] * 9 + [NEITHER_HAS_IT], True),
        ([LOST_TO_PLAIN] * 9 + [NEITHER_HAS_IT] * 2, False),
        ([NEITHER_HAS_IT] * 9 + [LOST_TO_PLAIN] * 2, True),
        ([{**LOST_TO_PLAIN, "plain_tokens": 0, "achievable_tokens": 0, "held_tokens": 0}], False),
    ],
)
def test_it_is_due_at_a_quarter_of_what_a_plain_cache_holds_and_paid_back_by_what_such_a_cache_loses(seen, is_due):
    regret = Regret()
    for each in seen:
        regret.saw(**each)
    assert regret.is_due is is_due
    regret.clear()
    assert not regret.is_due


def chat(number, turns):
    """Eight tokens for each turn, and one behind."""
    return (*range(1000 * number, 1000 * number + 8 * turns), 999_999)


def talk(house, numbers, turns):
    """Each in its turn, in rotation; returns what each request reused, by turn."""
    reused = []
    for turn in range(1, turns + 1):
        for number in numbers:
            lease = house.serve(chat(number, turn), 8 * turn)
            reused.append((turn, lease.report.cached_tokens))
            house.demote()
    return reused


@pytest.mark.parametrize(
    "sizes", [{"state_slots": 9}, {"state_slots": 3, "host_units": 120, "host_state_cap": 8, "demote_ahead": 2}]
)
def test_people_who_all_begin_anew_at_once_find_their_new_conversations_after_the_first_time(sizes):
    """The dead conversations are worth more by all that was learned, until they have aged."""
    house = House(kv_pages=400, **sizes)
    for generation in range(4):
        talk(house, range(20 * generation + 10, 20 * generation + 18), turns=4)
    reused = talk(house, range(100, 108), turns=4)
    assert [cached for _, cached in reused] == [8 * (turn - 1) for turn, _ in reused]
    assert house.cache.tiers.store.regret.is_due


def test_what_was_lost_to_what_was_worth_more_is_a_bet_until_a_plain_rule_is_due():
    house = House(state_slots=3)
    house.serve(chat(1, 4), 32)
    house.serve(chat(2, 1), 8)
    house.serve(chat(3, 1), 8)
    report = house.report(chat(2, 2), 16)
    assert report.lost[LossReason.EVICTED_STATE] == report.expected_tokens == report.bet_tokens == 8
    assert report.fault_tokens == 0
    house.cache.tiers.store.regret.is_due = True
    house.serve(chat(2, 1), 8)
    house.serve(chat(4, 1), 8)
    assert house.report(chat(2, 2), 16).bet_tokens == 0


def test_a_reset_forgets_it():
    house = House()
    house.cache.tiers.store.regret.saw(**{**LOST_TO_PLAIN, "held_tokens": 8})
    assert house.cache.tiers.store.regret.is_due
    house.cache.reset()
    assert not house.cache.tiers.store.regret.is_due


def test_what_a_plain_cache_would_hold_is_marked_in_every_checkpoint_as_it_changes():
    house = House(state_slots=9)
    house.serve((*range(12), 99), 8, 12)
    assert house.checkpoint(range(12)).is_plain
    for number in range(20, 40):
        house.serve(chat(number, 1), 8)
        store, expectation = house.cache.tiers.store, house.cache.retention.expectation
        held = {entry.checkpoint.number for entry in expectation._entries.values() if not entry.is_spared}
        assert {each.number for each in store if each.is_plain} == {each.number for each in store} & held
    house.cache.retention.expectation.clear()
    assert not any(each.is_plain for each in house.cache.tiers.store)
