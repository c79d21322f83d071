"""Which places of a prompt become checkpoints."""

import pytest

from cache import CacheOptions, CheckpointKind, ContextCache, Frontier, Known
from engine.frontiers import (
    FrontierRules,
    anchors,
    branch,
    next_cut,
    prompt_frontiers,
    settle_anchors,
    with_places_on_the_way,
)
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
    ("closure", "cached", "at_most", "vacant", "expected"),
    [
        (80, 0, 4, 0, [20, 40, 60]),
        (80, 0, 1, 0, [40]),
        (80, 0, 0, 0, []),
        (80, 0, 0, 9, []),
        (80, 60, 4, 0, []),
        (80, 35, 4, 0, [50, 70]),
        (15, 0, 4, 0, []),
        (80, 80, 4, 9, []),
        (80, 0, 4, 3, [20, 40, 60]),
        (80, 0, 1, 5, [10, 30, 40, 50, 70]),
        (80, 0, 4, 99, [10, 20, 30, 40, 50, 60, 70]),
        (80, 0, 4, -2, [20, 40, 60]),
    ],
)
def test_a_long_region_that_is_computed_anew_gets_a_ladder_at_ends_of_chunks(
    closure, cached, at_most, vacant, expected
):
    found = anchors((Frontier(closure, CLOSURE),), cached, FrontierRules(10, at_most, None), vacant)
    assert {f.kind for f in found} <= {ANCHOR}
    assert [f.tokens for f in found] == expected


@pytest.mark.parametrize(
    ("known", "cached", "named", "expected"),
    [
        (47, 0, [(80, CLOSURE)], [47]),
        (47, 43, [(80, CLOSURE)], [47]),
        (47, 44, [(80, CLOSURE)], []),
        (47, 0, [(44, STABLE), (80, CLOSURE)], []),
        (47, 0, [(30, STABLE), (80, CLOSURE)], [47]),
        (3, 0, [(80, CLOSURE)], []),
        (4, 0, [(80, CLOSURE)], [4]),
        (80, 0, [(80, CLOSURE)], []),
        (0, 0, [(80, CLOSURE)], []),
    ],
)
def test_where_a_prompt_leaves_what_was_computed_before_is_marked_to_the_token(known, cached, named, expected):
    frontiers = tuple(Frontier(tokens, kind) for tokens, kind in named)
    assert [f.tokens for f in branch(frontiers, known, cached, 4)] == expected
    assert branch(frontiers, known, cached, None) == ()


@pytest.mark.parametrize("chunk", [8, 512, 2048])
def test_the_chunk_has_no_say_in_where_a_branch_is(chunk):
    found = with_places_on_the_way((Frontier(80, CLOSURE),), Known(branch_tokens=47), 0, FrontierRules(chunk, 0, 16))
    assert [f.tokens for f in found] == [80, 47]


def test_a_conversation_that_was_lost_and_goes_on_makes_no_branch():
    named, rules = (Frontier(80, CLOSURE),), FrontierRules(10, 0, 4)
    assert len(with_places_on_the_way(named, Known(branch_tokens=47, promised_tokens=43), 0, rules)) == 2
    assert with_places_on_the_way(named, Known(branch_tokens=47, promised_tokens=44), 0, rules) == named


def test_no_place_is_marked_twice():
    found = with_places_on_the_way((Frontier(80, CLOSURE),), Known(branch_tokens=40), 0, FrontierRules(10, 4, 4), 99)
    places = [f.tokens for f in found]
    assert len(set(places)) == len(places)
    assert {40, 80} < set(places)


@pytest.mark.parametrize(
    ("spare_slots", "host_units", "has_state", "max_anchors", "branch_gain"),
    [
        (16, 0, True, 4, 16),
        (3, 0, True, 1, 16),
        (2, 0, True, 1, 16),
        (1, 0, True, 0, None),
        (1, 4, True, 0, 16),
        (0, 8, True, 0, 16),
        (0, 4, True, 0, None),
        (16, 99, False, 0, None),
    ],
)
def test_no_place_is_marked_where_no_slot_could_keep_it_beside_the_newest_turn(
    spare_slots, host_units, has_state, max_anchors, branch_gain
):
    options = CacheOptions(16, 100, 3 + spare_slots, has_state, host_units=host_units, host_units_per_state=4)
    assert FrontierRules.of(options, 3, 512) == FrontierRules(512, max_anchors, branch_gain)


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        (5, [(12, STABLE), (10, ANCHOR), (20, ANCHOR)]),
        (6, [(12, STABLE), (20, ANCHOR), (6, ANCHOR)]),
        (10, [(12, STABLE), (20, ANCHOR), (10, ANCHOR)]),
        (12, [(12, STABLE), (20, ANCHOR)]),
        (17, [(12, STABLE), (17, ANCHOR)]),
    ],
)
def test_an_anchor_is_taken_where_the_segment_ends_that_ends_nearest(end, expected):
    cache = ContextCache(CacheOptions(4, 100, 9, has_state=True))
    wanted = tuple(Frontier(*each) for each in [(12, STABLE), (10, ANCHOR), (20, ANCHOR)])
    lease = cache.admit(cache.match("r", "", tuple(range(40))), 40, wanted, 0.0)
    settle_anchors(lease, end, 10)
    assert lease.wanted == [Frontier(*each) for each in expected]


def test_no_segment_is_cut_for_an_anchor():
    wanted = (Frontier(5, STABLE), Frontier(10, ANCHOR), Frontier(30, CLOSURE))
    assert [next_cut(wanted, computed, 40) for computed in (0, 5, 10, 30)] == [5, 30, 30, 40]
