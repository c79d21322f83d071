"""Each baseline on traces whose hits were counted by hand, and the bound against all of them."""

from __future__ import annotations

from functools import lru_cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.policies import BlockAligned, Clairvoyant, Lru, Marconi, RadixLru
from bench.policies.clairvoyant import WEIGHTS, Future
from tests.bench.replay.traces import asks


def _hits(policy, served):
    return [policy.serve(ask) for ask in served]


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        # A state for each of two conversations; the third pushes out the first.
        (["aa.", "bb.", "cc.", "aa.", "cc."], [0, 0, 0, 0, 2]),
        # Being resumed from keeps a state: b goes, not a.
        (["aa.", "bb.", "aa.", "cc.", "aa."], [0, 0, 2, 0, 2]),
        # A turn adds its own state, so two turns of one conversation fill both slots.
        (["aa.", "bb.", "aaa.", "aaaa.", "bb."], [0, 0, 2, 3, 0]),
    ],
)
def test_lru_with_two_slots(prompts, expected):
    assert _hits(Lru(2), asks(*prompts)) == expected


def test_radix_lru_refreshes_what_lies_above_and_so_keeps_it_longer():
    # ab is above abab, which the third request resumes from; then c pushes out the oldest: x for SGLang, ab for LRU.
    served = asks("ab.", "abab.", "xy.", "abab.", "cd.", "abQ.")
    assert _hits(RadixLru(3), served)[-1] == 2
    assert _hits(Lru(3), served)[-1] == 0


def test_block_aligned_resumes_at_the_end_of_a_block_only():
    served = asks("abcde.", "abcde.", "a.", "a.")
    assert _hits(BlockAligned(4), served) == [0, 4, 0, 0]
    assert _hits(Lru(4), served) == [0, 5, 0, 1]


def test_marconi_keeps_the_long_one_where_lru_keeps_the_recent_one():
    served = asks("abcdefgh.", "x.", "y.", "abcdefgh.")
    assert _hits(Marconi(2, alpha=2.0), served) == [0, 0, 0, 8]
    assert _hits(Marconi(2, alpha=0.0), served) == _hits(Lru(2), served) == [0, 0, 0, 0]


def test_marconi_takes_the_alpha_that_reused_most():
    assert Marconi.fitted(2, asks("abcdefgh.", "x.", "y.", "abcdefgh.", "x.")).alpha > 0
    assert Marconi.fitted(2, asks("x.", "y.")).alpha == 0


def test_the_clairvoyant_does_not_hold_what_nobody_comes_back_to():
    served = asks("aa.", "bb.", "cc.", "dd.", "aa.", "bb.")
    assert _hits(Clairvoyant(2, Future(served)), served) == [0, 0, 0, 0, 2, 2]


def test_the_clairvoyant_weighs_tokens_where_that_gives_more():
    served = asks("abcdefgh.", "x.", "x.", "abcdefgh.")
    best = max(sum(_hits(Clairvoyant(1, Future(served), weight), served)) for weight in WEIGHTS)
    assert best == 8


@pytest.mark.parametrize("policy", [Lru(0), RadixLru(0), BlockAligned(0), Marconi(0, 1.0)], ids=lambda p: p.name)
def test_without_slots_nothing_is_reused(policy):
    assert sum(_hits(policy, asks("aa.", "aa."))) == 0


FLAT = st.lists(st.sampled_from([f"{letter}{letter}." for letter in "abcdef"]), min_size=1, max_size=40)
NESTED = st.lists(st.text("ab", min_size=1, max_size=4).map(lambda text: f"{text}."), min_size=1, max_size=10)


@given(FLAT, st.integers(1, 5))
def test_no_online_policy_beats_the_clairvoyant_where_places_save_alike(prompts, slots):
    served = asks(*prompts)
    bound = sum(_hits(Clairvoyant(slots, Future(served)), served))
    online = (Lru(slots), RadixLru(slots), *(Marconi(slots, alpha) for alpha in (0.0, 0.5, 1.0)))
    assert all(sum(_hits(policy, served)) <= bound for policy in online)


@given(NESTED, st.integers(1, 3))
def test_no_policy_reuses_more_than_the_best_plan_there_is(prompts, slots):
    served = asks(*prompts)
    best = _best_plan(served, slots)
    policies = [Lru(slots), RadixLru(slots), Marconi(slots, 0.5)]
    policies += [Clairvoyant(slots, Future(served), weight) for weight in WEIGHTS]
    assert all(sum(_hits(policy, served)) <= best for policy in policies)


def _best_plan(served, slots):
    """The most that can be reused, by trying every choice of what to hold."""

    @lru_cache(None)
    def from_here(number, held):
        if number == len(served):
            return 0
        ask = served[number]
        hit = max((place.tokens for place in ask.path if place.number in held), default=0)
        states = {held}
        for offer in ask.offers:
            if offer.place.tokens > hit:
                states |= {new for each in states for new in _choices(each | {offer.place.number}, slots)}
        return hit + max(from_here(number + 1, state) for state in states)

    return from_here(0, frozenset())


def _choices(held, slots):
    return [held] if len(held) <= slots else [held - {each} for each in held]
