"""Which places of a prompt become checkpoints."""

import pytest

from cache import CheckpointKind, Frontier
from engine.frontiers import anchors, prompt_frontiers
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
