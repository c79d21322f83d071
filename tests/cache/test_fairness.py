"""One namespace cannot push out all others."""

from __future__ import annotations

import pytest

from cache import Frontier, Tier
from tests.cache.house import CLOSURE, House


def flood(house, count, namespace):
    for number in range(count):
        first = 1000 * (number + 1)
        house.serve(range(first, first + 33), 32, namespace=namespace)


@pytest.fixture
def house():
    """Slots for eight conversations beside the running one and what it captures."""
    return House(state_slots=9, kv_pages=400)


def test_a_flood_leaves_a_namespace_below_its_share_alone(house):
    for number in range(3):
        house.serve(range(100 * number, 100 * number + 6), 5, namespace="quiet")
    flood(house, 60, "loud")
    assert [house.reused(range(first, first + 6), "quiet") for first in (0, 100, 200)] == [5, 5, 5]


def test_alone_a_namespace_may_have_it_all(house):
    flood(house, 8, "loud")
    assert [house.reused(range(first, first + 33), "loud") for first in range(1000, 9000, 1000)] == [32] * 8


def test_pages_are_shared_out_like_slots():
    house = House(state_slots=40, kv_pages=40)
    house.serve(range(100, 106), 5, namespace="quiet")
    flood(house, 30, "loud")
    assert house.reused(range(100, 106), "quiet") == 5


def test_where_only_the_others_have_something_to_give_they_give_it():
    house = House(state_slots=3)
    for number in range(2):
        house.serve(range(100 * number, 100 * number + 6), 5, namespace="quiet")
    house.serve(range(1000, 1006), 5, namespace="new")
    assert house.reused(range(1000, 1006), "new") == 5


def flood_both_tiers(house, count, namespace):
    """Like `flood`, copying to host memory while each of them runs."""
    for number in range(count):
        first = 1000 * (number + 1)
        lease = house.admit(range(first, first + 6), [Frontier(5, CLOSURE)], namespace)
        house.demote(1)
        house.compute(lease)
        house.demote(1)
        house.cache.abort(lease, lease.tokens, 0, house.tick())
        house.demote(1)


@pytest.mark.parametrize("idle_seconds", [0, 20_000])
def test_a_flood_of_both_tiers_leaves_a_namespace_below_its_share_something_of_each(idle_seconds):
    house = House(host_units=16, state_slots=5, demote_ahead=1)
    for first in (0, 100):
        house.serve(range(first, first + 6), 5, namespace="quiet")
        house.demote()
    house.now += idle_seconds
    flood_both_tiers(house, 60, "loud")
    assert [house.reused(range(first, first + 6), "quiet") for first in (0, 100)] == [5, 5]


def test_a_flood_of_host_memory_leaves_alone_what_is_there_alone():
    house = House(host_units=16, state_slots=5, demote_ahead=1)
    for first in (0, 100):
        house.keep_in_host(range(first, first + 6), 5, namespace="quiet")
    house.now += 20_000
    flood_both_tiers(house, 60, "loud")
    assert [house.reused(range(first, first + 6), "quiet") for first in (0, 100)] == [5, 5]


def test_namespaces_are_counted_whether_their_entries_may_go_at_once_or_not():
    house = House(host_units=4, state_slots=5, demote_ahead=1)
    house.serve(range(100, 106), 5, namespace="quiet")
    house.demote()
    house.serve(range(6), 5, namespace="loud")
    line = house.cache.tiers.store.slots
    assert [len(ranking) for ranking in (line.ready, line.others)] == [1, 1]
    assert (len(line.held), line.held["quiet"], line.held["loud"], line.held["nobody"]) == (2, 1, 1, 0)


def keep_two_turns_in_host(house, prompt, namespace):
    half = len(prompt) // 2
    house.serve(prompt[:half], half - 1, namespace=namespace)
    house.demote()
    house.keep_in_host(prompt, len(prompt) - 1, namespace=namespace)


@pytest.mark.parametrize("is_large_first", [True, False])
def test_shares_of_host_memory_are_of_its_units_whatever_an_entry_takes(is_large_first):
    """One client's entries take 100 units each, the other's 31; together they are more than there is."""
    house = House(kv_pages=200, state_slots=9, host_units=400)
    large = {"large": [range(1000 * n, 1000 * n + 393) for n in range(1, 5)]}
    small = {"small": [range(1000 * n, 1000 * n + 117) for n in range(11, 17)]}
    for namespace, prompts in (large | small if is_large_first else small | large).items():
        for prompt in prompts:
            keep_two_turns_in_host(house, prompt, namespace)
    assert [house.reused(prompt, "small") for prompt in small["small"]] == [116] * 6
    assert sum(house.reused(prompt, "large") == 392 for prompt in large["large"]) == 2


def test_what_was_asked_for_once_has_no_right_to_a_share():
    """Who takes a new name for each request would have all of it."""
    house = House(kv_pages=200, state_slots=9, host_units=400)
    prompts = [range(1000 * n, 1000 * n + 393) for n in range(1, 5)]
    for prompt in prompts:
        keep_two_turns_in_host(house, prompt, "person")
    for n in range(11, 31):
        house.keep_in_host(range(1000 * n, 1000 * n + 117), 116, namespace=f"salt {n}")
    assert [house.reused(prompt, "person") for prompt in prompts] == [392] * 4


def test_pages_that_many_entries_share_are_held_once():
    house = House(kv_pages=200, state_slots=9, host_units=400)
    for last in range(3):
        house.serve((*range(40), 1000 + last, 0), 41, namespace="shares")
    house.serve(range(5000, 5081), 80, namespace="does not")
    while house.demote():
        pass
    store = house.cache.tiers.store
    assert store.held[Tier.DEVICE].by_namespace() == {"shares": 10 + 3, "does not": 20}
    assert store.held[Tier.HOST].by_namespace() == {"shares": 10 + 3 + 3 * 2, "does not": 20 + 2}
