"""Policies side by side: all on the same requests, and what their figures are shares of."""

from __future__ import annotations

import pytest

from bench.replay.compare import Comparison, Slots, most_live, parse_slots, usual_slots
from engine.errors import UnusableOptionError
from tests.bench.replay.test_simulation import TINY
from tests.bench.replay.traces import ListTrace, request

PROMPTS = ["a" * 9 + ".", "b" * 7 + ".", "c" * 5 + ".", "a" * 9 + ".", "b" * 7 + ".", "a" * 9 + "."]


def _outcomes(prompts, slots, report_from=0.0):
    trace = ListTrace(request(number, prompt) for number, prompt in enumerate(prompts))
    comparison = Comparison(trace, TINY, slots, report_from)
    comparison.run(lambda done: None)
    return {(outcome.policy, outcome.slots.total): outcome for outcome in comparison.outcomes()}


def test_with_slots_for_all_every_policy_reuses_all_that_can_be():
    outcomes = _outcomes(PROMPTS, [Slots(6)])
    hits = {policy: outcome.hit_tokens for (policy, _), outcome in outcomes.items()}
    assert hits.pop("block-aligned (vLLM)") < 9 + 7 + 9
    assert set(hits.values()) == {9 + 7 + 9}
    assert outcomes["dalsegno", 6].of_achievable == outcomes["dalsegno", 6].of_bound == 1.0


def test_shares_are_of_the_reported_requests_only():
    outcome = _outcomes(PROMPTS, [Slots(6)], report_from=0.5)["LRU", 6]
    assert outcome.hit_tokens == 25
    assert outcome.hit_rate == 25 / (10 + 8 + 10)


def test_slots_in_host_memory_count_for_every_policy():
    outcomes = _outcomes(PROMPTS, [Slots(1, 2), Slots(1)])
    assert outcomes["LRU", 3].hit_tokens > outcomes["LRU", 1].hit_tokens
    assert outcomes["dalsegno", 3].hit_tokens > outcomes["dalsegno", 1].hit_tokens


def test_each_number_of_slots_has_its_own_bound():
    outcomes = _outcomes(PROMPTS, [Slots(1), Slots(6)])
    assert outcomes["clairvoyant (bound)", 1].hit_tokens < outcomes["clairvoyant (bound)", 6].hit_tokens
    assert all(outcome.of_bound <= 1 for outcome in outcomes.values())


@pytest.mark.parametrize(
    ("text", "expected"), [("40,160", [Slots(40), Slots(160)]), ("12+48", [Slots(12, 48)]), (" 3 ", [Slots(3)])]
)
def test_slots_are_read(text, expected):
    assert parse_slots(text) == expected


@pytest.mark.parametrize("text", ["", "0", "a", "1+2+3", "4,", "-1", "5+"])
def test_slots_that_are_none_are_refused(text):
    with pytest.raises(UnusableOptionError, match="--slots"):
        parse_slots(text)


def test_the_usual_slots_follow_the_conversations_that_live_at_once():
    threads = [
        request(number, "a.", at=at, thread=str(thread))
        for number, (at, thread) in enumerate([(0, 1), (0, 2), (1, 3), (2, 1), (2, 2), (3, 9), (4, 3), (5, 4), (6, 4)])
    ]
    assert most_live(ListTrace(threads)) == 3
    assert usual_slots(ListTrace(threads)) == [Slots(1, 3), Slots(1, 0)]
    assert usual_slots(ListTrace([request(0, "a.")])) == [Slots(40), Slots(160), Slots(640)]
