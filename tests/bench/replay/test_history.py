"""What is offered, and what could be resumed with unlimited memory."""

from __future__ import annotations

import pytest

from bench.replay.history import History, OfferRules
from cache import CheckpointKind
from engine.frontiers import FrontierRules
from tests.bench.replay.traces import NO_LADDER, asks, request

CLOSURE, BRANCH, STABLE, ANCHOR, ENDPOINT = (
    CheckpointKind.PRIVATE_TURN_CLOSURE,
    CheckpointKind.SHARED_BRANCH,
    CheckpointKind.SHARED_STABLE_PREFIX,
    CheckpointKind.PRIVATE_LONG_ANCHOR,
    CheckpointKind.PRIVATE_ENDPOINT,
)


def _offers(ask):
    return [(offer.place.tokens, offer.kind) for offer in ask.offers]


def test_the_first_prompt_has_nothing_to_resume_and_offers_all_but_its_last_token():
    (ask,) = asks("abcd.")
    assert (ask.path, _offers(ask)) == ((), [(4, CLOSURE)])


@pytest.mark.parametrize(
    ("second", "achievable"),
    [("abcd.", 4), ("abcdef.", 4), ("abc", 0), ("abcd", 0), ("xbcd.", 0), ("abxd.", 0)],
    ids=["again", "longer", "shorter", "no token left", "other", "rewritten"],
)
def test_a_prompt_is_resumed_at_what_was_offered_before(second, achievable):
    assert asks("abcd.", second)[1].achievable_tokens == achievable


def test_where_prompts_part_is_a_branch_and_equal_prefixes_are_one_place():
    first, second, third = asks("abcdef.", "abcxyz.", "abcuvw.")
    assert _offers(second) == [(3, BRANCH), (6, CLOSURE)]
    assert third.path == (second.offers[0].place,)
    assert first.path == second.path == ()


def test_a_branch_stands_where_prompts_part_and_is_not_offered_close_behind_a_known_place():
    rules = OfferRules(FrontierRules(chunk=4, max_anchors=0, branch_gain=4), block=2)
    assert _offers(asks("abcdef.", "abcdeX.", rules=rules)[1]) == [(5, BRANCH), (6, CLOSURE)]
    assert _offers(asks("abcd.", "abcdefgh.", "abcdefXY.", rules=rules)[2]) == [(8, CLOSURE)]


def test_a_long_prompt_has_a_ladder_in_what_is_new():
    rules = OfferRules(FrontierRules(chunk=2, max_anchors=2, branch_gain=1), block=2)
    ladder = [tokens for tokens, kind in _offers(asks("abcdefghijklmnop.", rules=rules)[0]) if kind is ANCHOR]
    assert ladder
    assert all(tokens % 2 == 0 for tokens in ladder)


def test_the_stable_prefix_and_the_end_of_an_answer_are_offered_too():
    ask = History(NO_LADDER, 1).ask(request(0, "abcd.", answer="xyz", stable=2))
    assert _offers(ask) == [(2, STABLE), (4, CLOSURE), (7, ENDPOINT)]


def test_namespaces_share_nothing():
    history = History(NO_LADDER, 1)
    history.ask(request(0, "abcd."))
    other = request(1, "abcd.")
    object.__setattr__(other, "namespace", "elsewhere")
    assert history.ask(other).path == ()


def test_block_places_stand_at_ends_of_blocks():
    first, second = asks("abcde.", "abcdX.")
    assert [place.tokens for place in first.block_offers] == [4]
    assert [place.tokens for place in second.block_path] == [4]


def test_symbols_count_what_is_distinct():
    history = History(NO_LADDER, 1)
    for number, prompt in enumerate(("abcd.", "abcd.", "abxy.")):
        history.ask(request(number, prompt))
    assert history.symbols == 5 + 3
