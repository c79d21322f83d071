"""A rewritten history tells the place where it was rewritten; only a turn that is repeated makes it one."""

from __future__ import annotations

import pytest

from cache import Frontier, LossReason
from tests.cache.house import CLOSURE, ENDPOINT, SHARED, House

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


def test_a_first_message_has_no_history_however_much_of_another_it_repeats():
    house = House()
    for last in (60, 70, 80):
        few_shot = (*range(8), *range(20, 50), last, last + 1)
        assert diverged_at(house, few_shot) is None
        house.serve((*few_shot, 99), Frontier(8, SHARED), len(few_shot))


@pytest.mark.parametrize("has_state", [True, False], ids=["hybrid", "attention only"])
def test_a_raw_prompt_has_no_turns_even_where_it_goes_on_behind_another(has_state):
    house = House(has_state=has_state)
    for prompt in (range(21), (*range(20), 30, 31, 32), (*range(20), 30, 41, 42), (*range(20), 50, 51, 52, 53)):
        raw = Frontier(len(prompt) - 1, CLOSURE, is_turn=False)
        match = house.match(prompt)
        report = house.cache.report(match, [raw])
        house.cache.release(match)
        assert (report.diverged_at, report.lost.get("diverged")) == (None, None)
        house.serve(prompt, raw)


OPENING = (96, 97, 98)
"""Of an answer."""
QUESTION, INJECTED, ANSWER = range(20, 26), (96, 70, 71, 72), range(30, 42)


def test_examples_in_messages_of_their_own_are_no_history():
    """More and more of them before each question; nobody was asked those in between."""
    house = House()
    shots: tuple[int, ...] = ()
    for number in range(100, 180, 20):
        prompt = (*range(8), *shots, 96, *range(number, number + 5))
        report = house.report((*prompt, *OPENING), 8, len(prompt))
        assert report.diverged_at is None
        house.serve((*prompt, *OPENING, 500 + number, 501 + number), Frontier(8, SHARED), len(prompt), endpoint=True)
        shots = (*shots, 96, *range(number + 10, number + 13), *OPENING, number + 15, number + 16)


@pytest.mark.parametrize(
    ("thinking", "answer"),
    [((), ANSWER), (range(200, 230), ANSWER), ((), (30,))],
    ids=["an answer", "an answer without the thinking before it", "a short answer"],
)
def test_who_sends_an_answer_back_and_not_what_was_asked_rewrites_the_question(thinking, answer):
    """A message that a proxy injects and never sends again: no turn ever comes back as it was."""
    house = House()
    asked = (*range(8), *QUESTION)
    sent = (*asked, *INJECTED)
    house.serve((*sent, *OPENING, *thinking, *answer), Frontier(8, SHARED), len(sent), endpoint=True)
    goes_on = (*asked, *OPENING, *answer, 95, 96, 60, 61, 62)
    assert house.report((*goes_on, *OPENING), 8, len(goes_on)).diverged_at == len(asked) + 1
    another = (*asked, *OPENING, *range(300, 312), 95, 96, 60, 61, 62)
    assert house.report((*another, *OPENING), 8, len(another)).diverged_at is None


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
