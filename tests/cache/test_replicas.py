"""References and pins of one page: who holds it is known at every moment, and when nobody does it is free."""

from __future__ import annotations

import pytest

from cache import Holder, Pool, Tier, UnitHandle, UnitState
from cache.replicas import Replica

ONE, TWO = Holder(UnitState.PINNED, "one"), Holder(UnitState.IN_FLIGHT, "two")


@pytest.fixture
def pool():
    return Pool("pages", 3)


@pytest.fixture
def page(pool):
    return Replica(pool.lease(ONE, 1), Tier.HOST)


def test_a_page_is_named_by_its_tier_and_unit(page):
    assert (page.unit, page.handle) == (0, UnitHandle(Tier.HOST, (0,)))


def test_who_takes_a_page_has_it_pinned(page, pool):
    assert pool.counts().pinned == 1
    page.unpin(ONE)
    assert pool.free == 3


def test_a_page_pinned_twice_by_one_request_needs_two_unpins(page, pool):
    page.pin(ONE)
    page.unpin(ONE)
    assert pool.counts().pinned == 1
    page.unpin(ONE)
    assert pool.free == 3


def test_a_page_passes_to_whoever_still_has_it_pinned(page, pool):
    page.pin(TWO)
    page.unpin(ONE)
    assert (page.lease.holder, pool.counts().in_flight) == (TWO, 1)


def test_a_page_that_only_the_tree_refers_to_is_cached(page, pool):
    page.ref()
    page.unpin(ONE)
    assert (pool.counts().cached, pool.free) == (1, 2)
    page.pin(TWO)
    assert (pool.counts().cached, pool.counts().in_flight) == (0, 1)


def test_the_last_reference_frees_the_page(page, pool):
    page.ref()
    page.ref()
    page.unpin(ONE)
    page.unref()
    assert pool.counts().cached == 1
    page.unref()
    assert (pool.free, page.lease.is_open) == (3, False)


def test_a_reference_that_is_not_there_cannot_be_dropped(page):
    with pytest.raises(ValueError, match="no cached reference to drop"):
        page.unref()
    with pytest.raises(KeyError):
        page.unpin(TWO)
