"""Which places of a prompt become checkpoints."""

import pytest

from cache import CheckpointKind, Frontier, Known
from cache.tree import PrefixTree
from engine.frontiers import anchors, branch, prompt_frontiers, with_places_on_the_way
from engine.request import GenerationRequest

CLOSURE, STABLE = CheckpointKind.PRIVATE_TURN_CLOSURE, CheckpointKind.SHARED_STABLE_PREFIX
ANCHOR = CheckpointKind.PRIVATE_LONG_ANCHOR


@pytest.mark.parametrize(
    ("prompt_tokens", "given", "expected"),
    [
        (10, [], [(9, CLOSURE)]),
        (1, [], []),
        (2, [], [(1, CLOSURE)]),
        (10, [(7, CLOSURE), (3, STABLE)], [(3, STABLE), (7, CLOSURE)]),
        (10, [(3, STABLE)], [(3, STABLE), (9, CLOSURE)]),
        (10, [(9, STABLE)], [(9, STABLE)]),
        (10, [(0, STABLE), (10, CLOSURE), (99, CLOSURE), (-1, STABLE)], [(9, CLOSURE)]),
    ],
)
def test_a_prompt_has_its_named_frontiers_and_a_turn_closure(prompt_tokens, given, expected):
    named = tuple(Frontier(tokens, kind) for tokens, kind in given)
    request = GenerationRequest("r", tuple(range(prompt_tokens)), frontiers=named)
    assert [(f.tokens, f.kind) for f in prompt_frontiers(request)] == expected


@pytest.mark.parametrize(
    ("closure", "cached", "at_most", "expected"),
    [
        (80, 0, 4, [20, 40, 60]),
        (80, 0, 1, [40]),
        (80, 0, 0, []),
        (80, 60, 4, []),
        (80, 35, 4, [50, 70]),
        (15, 0, 4, []),
        (80, 80, 4, []),
    ],
)
def test_a_long_region_that_is_computed_anew_gets_a_ladder_at_ends_of_chunks(closure, cached, at_most, expected):
    found = anchors((Frontier(closure, CLOSURE),), cached, 10, at_most)
    assert {f.kind for f in found} <= {ANCHOR}
    assert [f.tokens for f in found] == expected


@pytest.mark.parametrize(
    ("known", "cached", "named", "expected"),
    [
        (47, 0, [(80, CLOSURE)], [40]),
        (47, 40, [(80, CLOSURE)], []),
        (47, 0, [(44, STABLE), (80, CLOSURE)], []),
        (47, 0, [(30, STABLE), (80, CLOSURE)], [40]),
        (9, 0, [(80, CLOSURE)], []),
        (80, 0, [(80, CLOSURE)], []),
        (0, 0, [(80, CLOSURE)], []),
    ],
)
def test_where_a_prompt_leaves_what_was_computed_before_is_marked_at_the_end_of_a_chunk(known, cached, named, expected):
    frontiers = tuple(Frontier(tokens, kind) for tokens, kind in named)
    assert [f.tokens for f in branch(frontiers, known, cached, 10)] == expected


def known_way(tokens: int, achievable: int = 0) -> Known:
    """So many tokens are known, and the way goes on otherwise from there."""
    tree = PrefixTree(1)
    tree.insert(tuple(range(tokens + 1)))
    return Known(
        tree=tree, tokens=tokens, nodes=tuple(tree.walk(tuple(range(tokens)), tokens)), achievable_tokens=achievable
    )


def test_a_conversation_that_was_lost_and_goes_on_makes_no_branch():
    named = (Frontier(80, CLOSURE),)
    assert 40 in [f.tokens for f in with_places_on_the_way(named, known_way(47, 38), 0, 10, 1)]
    found = with_places_on_the_way(named, known_way(47, 41), 0, 10, 1)
    assert CheckpointKind.SHARED_BRANCH not in {f.kind for f in found}


def test_no_place_is_marked_twice_and_none_where_there_are_no_slots_to_spare():
    named = (Frontier(80, CLOSURE),)
    places = [f.tokens for f in with_places_on_the_way(named, known_way(47), 0, 10, 4)]
    assert len(set(places)) == len(places)
    assert {40, 80} < set(places)
    assert with_places_on_the_way(named, known_way(47), 0, 10, 0) == named
