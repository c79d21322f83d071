"""A load is fixed by its seed: how many, how long, how often again, and when."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice, pairwise

import pytest

from bench.conversations import Load, Material, arrivals, message, plan_conversations, prompt_tokens

LOAD = Load(requests=400, concurrency=4, rate=None, turns=1, prompt_tokens=30, max_tokens=8, hit_share=0.5, seed=7)
MATERIAL = Material(range(50, 80), tokens_per_word=2.0)


@pytest.mark.parametrize(
    ("requests", "turns", "expected"), [(3, 1, [1, 1, 1]), (6, 3, [3, 3]), (7, 3, [3, 3, 1]), (2, 5, [2])]
)
def test_turns_add_up_to_the_requests(requests, turns, expected):
    conversations = plan_conversations(replace(LOAD, requests=requests, turns=turns))
    assert [conversation.turns for conversation in conversations] == expected


@pytest.mark.parametrize(("share", "least", "most"), [(0.0, 0, 0), (0.5, 160, 240), (1.0, 399, 399)])
def test_hits_send_a_prompt_that_an_earlier_conversation_sent(share, least, most):
    conversations = plan_conversations(replace(LOAD, hit_share=share))
    hits = [conversation for conversation in conversations if conversation.prompt != conversation.number]
    assert least <= len(hits) <= most
    fresh = {conversation.number for conversation in conversations} - {hit.number for hit in hits}
    assert all(hit.prompt in fresh and hit.prompt < hit.number for hit in hits)


def test_prompts_have_their_length_and_differ_unless_they_are_sent_again():
    conversations = plan_conversations(LOAD)
    prompts = {each.number: tuple(prompt_tokens(LOAD, each, MATERIAL)) for each in conversations}
    assert {len(prompt) for prompt in prompts.values()} == {30}
    assert all(prompts[each.number] == prompts[each.prompt] for each in conversations)
    assert len(set(prompts.values())) == len({each.prompt for each in conversations})


def test_messages_differ_by_turn_and_have_about_the_length():
    first, second = plan_conversations(LOAD)[:2]
    messages = [message(LOAD, each, turn, MATERIAL) for each in (first, second) for turn in (1, 2)]
    assert len(set(messages)) == 4
    assert {len(text.split()) for text in messages} == {15}


def test_arrivals_come_at_the_rate_and_not_evenly():
    times = list(islice(arrivals(replace(LOAD, concurrency=None, rate=10.0, turns=2)), 2001))
    assert times[-1] == pytest.approx(2000 / 5, rel=0.1)
    gaps = [b - a for a, b in pairwise(times)]
    assert min(gaps) < 0.02 < 0.5 < max(gaps)


def test_another_seed_asks_something_else():
    other = replace(LOAD, seed=8)
    first = plan_conversations(LOAD)[0]
    assert prompt_tokens(LOAD, first, MATERIAL) == prompt_tokens(LOAD, first, MATERIAL)
    assert prompt_tokens(LOAD, first, MATERIAL) != prompt_tokens(other, first, MATERIAL)
