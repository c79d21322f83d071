"""One namespace cannot push out all others."""

from __future__ import annotations

import pytest

from tests.cache.house import House


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
