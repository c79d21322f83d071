"""One namespace cannot push out all others."""

from __future__ import annotations

import pytest

from cache import Frontier
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
    assert (line.namespaces, line.count("quiet"), line.count("loud"), line.count("nobody")) == (2, 1, 1, 0)
