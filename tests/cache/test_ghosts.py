"""What was lost is remembered, within bounds, and forgotten from the oldest on."""

from __future__ import annotations

import pytest

from cache import LossReason
from tests.cache.house import House


def lose_all(house):
    for checkpoint in tuple(house.cache.tiers.store):
        house.cache.tiers.lose(checkpoint, LossReason.EVICTED_STATE)
    house.assert_sound()


@pytest.mark.parametrize(("ghost_nodes", "known"), [(0, 0), (1, 0), (2, 1), (3, 1), (5, 2), (6, 3)])
def test_no_more_pages_are_known_than_the_limit_allows(ghost_nodes, known):
    """Each prompt has two."""
    house = House(ghost_nodes=ghost_nodes, state_slots=4)
    for first in range(0, 1000, 100):
        house.serve(range(first, first + 9), 8)
        lose_all(house)
    house.cache.tiers.ghosts.trim()
    assert (len(house.cache.tiers.ghosts), house.cache.tiers.ghosts.counts.ghosts) == (known, 2 * known)
    lost = [house.report(range(first, first + 9), 8).lost for first in range(0, 1000, 100)]
    assert lost == [{"cold": 8}] * (10 - known) + [{"evicted_state": 8}] * known
    house.assert_sound()


def test_without_a_limit_of_its_own_twice_as_much_is_known_as_fits():
    house = House(kv_pages=10, host_units=5)
    for first in range(0, 4000, 100):
        house.serve(range(first, first + 9), 8)
        lose_all(house)
        house.cache.tiers.ghosts.trim()
        assert house.cache.tiers.ghosts.counts.ghosts <= 30
    assert house.cache.tiers.ghosts.counts.ghosts == 30


def test_checkpoints_that_share_their_pages_are_bounded_too():
    house = House(ghost_nodes=2)
    for number in range(80):
        house.serve((7, number, 0), 2)
        lose_all(house)
    house.cache.tiers.ghosts.trim()
    assert len(house.cache.tiers.ghosts) == 64


def test_the_tree_of_a_namespace_goes_with_its_last_ghost():
    house = House(ghost_nodes=2)
    for number in range(10):
        house.serve(range(9), 8, namespace=f"user{number}")
        lose_all(house)
    house.cache.tiers.ghosts.trim()
    assert list(house.cache.tiers.ghosts.trees) == ["user9"]


def test_a_path_that_something_live_needs_outlives_its_ghosts():
    house = House(ghost_nodes=0)
    house.serve(range(9), 4, 8)
    house.cache.tiers.lose(house.checkpoint(range(8)), LossReason.EVICTED_STATE)
    house.cache.tiers.ghosts.trim()
    assert house.reused(range(9)) == 4
    assert house.cache.tiers.ghosts.counts.nodes == 1
    house.assert_sound()


def test_a_ghost_that_is_used_lives_on_when_it_is_published_again():
    house = House(ghost_nodes=2)
    house.serve(range(9), 8)
    lose_all(house)
    house.serve(range(9), 8)
    assert house.checkpoint(range(8)).uses == 1, "the request would have used it"
    assert house.reused(range(9)) == 8
    assert len(house.cache.tiers.ghosts) == 0
