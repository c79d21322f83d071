"""Pools and leases: nothing is lost, nothing has two owners, and every refusal takes nothing."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from cache import Holder, Lease, Pool, PoolCounts, PoolExhaustedError, UnitState

PINNED = Holder(UnitState.PINNED, "request")
CHECKPOINT = Holder(UnitState.CACHED, "checkpoint")
HELD_STATES = [UnitState.CACHED, UnitState.PINNED, UnitState.IN_FLIGHT]


def test_a_fresh_pool_hands_out_its_units_in_order():
    assert Pool("pages", 4).lease(PINNED, 3).units == (0, 1, 2)


def test_a_lease_holds_nothing_until_it_is_asked_to():
    pool = Pool("pages", 2)
    assert (len(pool.lease(PINNED)), pool.free) == (0, 2)


def test_a_lease_grows_in_the_order_of_taking():
    pool = Pool("pages", 4)
    lease = pool.lease(PINNED, 1)
    pool.lease(PINNED, 1)
    assert lease.grow(2) == (2, 3)
    assert lease.units == (0, 2, 3)


def test_pages_that_came_together_are_given_out_together_again():
    pool = Pool("pages", 6)
    pool.lease(PINNED, 2)
    pool.lease(PINNED, 3).close()
    assert pool.lease(PINNED, 3).units == (2, 3, 4)


def test_an_exhausted_pool_takes_nothing_and_says_what_was_there():
    pool = Pool("pages", 2)
    pool.lease(PINNED, 1)
    with pytest.raises(PoolExhaustedError, match="'pages': 2 units wanted, 1 free"):
        pool.lease(PINNED, 2)
    assert (pool.free, pool.check()) == (1, [])


def test_a_growth_that_does_not_fit_takes_nothing():
    pool = Pool("pages", 2)
    lease = pool.lease(PINNED, 1)
    with pytest.raises(PoolExhaustedError):
        lease.grow(2)
    assert (lease.units, pool.free, pool.check()) == ((0,), 1, [])


@pytest.mark.parametrize("count", [-1, -5])
def test_a_negative_count_opens_no_lease(count):
    pool = Pool("pages", 2)
    with pytest.raises(ValueError, match=str(count)):
        pool.lease(PINNED, count)
    assert pool._leases == {}


def test_a_lease_can_be_closed_any_number_of_times():
    pool = Pool("pages", 2)
    lease = pool.lease(PINNED, 2)
    for _ in range(3):
        lease.close()
    assert (lease.units, lease.is_open, pool.free, pool.check()) == ((), False, 2, [])


def test_closing_a_lease_again_leaves_the_next_holder_alone():
    pool = Pool("pages", 1)
    former = pool.lease(PINNED, 1)
    former.close()
    later = pool.lease(PINNED, 1)
    former.close()
    assert (later.units, pool.check()) == ((0,), [])


def test_a_closed_lease_cannot_grow():
    lease = Pool("pages", 1).lease(PINNED)
    lease.close()
    with pytest.raises(ValueError, match="closed"):
        lease.grow(1)


def test_single_units_come_as_leases_of_their_own():
    pool = Pool("pages", 4)
    first, second = pool.singles(PINNED, 2)
    assert (first.units, second.units, pool.counts().pinned) == ((0,), (1,), 2)
    first.close()
    assert (second.units, pool.free, pool.check()) == ((1,), 3, [])


def test_the_last_units_can_be_taken_one_by_one():
    pool = Pool("pages", 3)
    assert ([lease.units for lease in pool.singles(PINNED, 3)], pool.free) == ([(0,), (1,), (2,)], 0)


def test_more_single_units_than_there_are_take_nothing():
    pool = Pool("pages", 2)
    assert len(pool.singles(PINNED, 1)) == 1
    with pytest.raises(PoolExhaustedError, match="2 units wanted, 1 free"):
        pool.singles(PINNED, 2)
    assert (len(pool.leases()), pool.free, pool.check()) == (1, 1, [])


def test_shrinking_keeps_the_order_of_the_rest():
    pool = Pool("pages", 4)
    lease = pool.lease(PINNED, 4)
    lease.shrink([1, 3])
    assert (lease.units, pool.free, pool.check()) == ((0, 2), 2, [])


def test_shrinking_by_a_foreign_unit_gives_back_nothing():
    pool = Pool("pages", 3)
    lease = pool.lease(PINNED, 2)
    with pytest.raises(ValueError, match=r"\[2\]"):
        lease.shrink([0, 2])
    assert (lease.units, pool.check()) == ((0, 1), [])


def test_renaming_moves_every_unit_to_another_state():
    pool = Pool("pages", 3)
    lease = pool.lease(PINNED, 2)
    lease.rename(CHECKPOINT)
    assert pool.counts() == PoolCounts(capacity=3, free=1, cached=2, pinned=0, in_flight=0)


def test_nobody_holds_a_free_unit():
    with pytest.raises(ValueError, match="no holder"):
        Holder(UnitState.FREE, "nobody")


def test_two_holders_of_one_name_are_two():
    assert Holder(UnitState.PINNED, "request") != Holder(UnitState.PINNED, "request")


def test_units_that_are_given_back_together_are_handed_out_in_order_again():
    pool = Pool("pages", 4)
    lease = pool.lease(PINNED, 4)
    lease.shrink([3, 0, 2])
    assert pool.lease(PINNED, 3).units == (0, 2, 3)


def test_a_negative_capacity_is_refused():
    with pytest.raises(ValueError, match="-1"):
        Pool("pages", -1)


@pytest.mark.parametrize(
    ("damage", "violation"),
    [
        (lambda pool, lease: pool._free.append(pool._free[0]), "on the free list twice"),
        (lambda pool, lease: pool._free.append(lease.units[0]), "is also free"),
        (lambda pool, lease: pool._free.append(99), "outside 0..3"),
        (lambda pool, lease: pool._free.pop(), "is lost"),
        (lambda pool, lease: lease._units.pop(), "has an owner but no open lease"),
        (lambda pool, lease: pool._leases.clear(), "has an owner but no open lease"),
        (lambda pool, lease: pool.lease(PINNED)._units.append(0), "is held by 'request' and 'request'"),
        (lambda pool, lease: pool._owner.clear(), "another owner on record"),
        (lambda pool, lease: lease._units.append(99), "unit 99 is outside 0..3"),
        (lambda pool, lease: pool._count(UnitState.PINNED, 1), "3 units pinned on record, 2 found"),
        (lambda pool, lease: pool._count(UnitState.PINNED, -1), "1 units pinned on record, 2 found"),
        (lambda pool, lease: pool._count(UnitState.CACHED, 1), "1 units cached on record, 0 found"),
        (lambda pool, lease: pool.lease(CHECKPOINT)._units.append(0), "is held by 'request' and 'checkpoint'"),
    ],
)
def test_check_finds_damage(damage, violation):
    pool = Pool("pages", 4)
    lease = pool.lease(PINNED, 2)
    damage(pool, lease)
    assert any(violation in line for line in pool.check())


class PoolMachine(RuleBasedStateMachine):
    """Random histories of leases, against a model that is a dictionary of sets."""

    leases = Bundle("leases")
    closed = Bundle("closed")

    @initialize(capacity=st.integers(0, 12))
    def start(self, capacity):
        self.pool = Pool("pages", capacity)
        self.model: dict[Lease, list[int]] = {}

    @rule(target=leases, count=st.integers(0, 13), state=st.sampled_from(HELD_STATES))
    def open(self, count, state):
        free = self.pool.free
        try:
            lease = self.pool.lease(Holder(state, "someone"), count)
        except PoolExhaustedError:
            assert (count > free, self.pool.free) == (True, free)
            return multiple()
        self.model[lease] = list(lease.units)
        assert len(lease) == count
        return lease

    @rule(lease=leases, count=st.integers(0, 6))
    def grow(self, lease, count):
        try:
            self.model[lease] += lease.grow(count)
        except PoolExhaustedError:
            assert count > self.pool.free

    @rule(lease=leases, data=st.data())
    def shrink(self, lease, data):
        leaving = data.draw(st.sets(st.sampled_from(lease.units))) if lease.units else set()
        lease.shrink(leaving)
        self.model[lease] = [unit for unit in self.model[lease] if unit not in leaving]

    @rule(lease=leases, state=st.sampled_from(HELD_STATES))
    def rename(self, lease, state):
        lease.rename(Holder(state, "someone else"))

    @rule(target=closed, lease=consumes(leases))
    def close(self, lease):
        lease.close()
        del self.model[lease]
        return lease

    @rule(lease=closed)
    def close_again(self, lease):
        lease.close()

    @invariant()
    def the_books_agree(self):
        if not hasattr(self, "pool"):
            return
        assert self.pool.check() == []
        assert {lease: list(lease.units) for lease in self.model} == self.model
        counts = self.pool.counts()
        assert counts.free + counts.cached + counts.pinned + counts.in_flight == counts.capacity
        for state, count in zip(HELD_STATES, (counts.cached, counts.pinned, counts.in_flight), strict=True):
            assert count == sum(len(lease) for lease in self.model if lease.holder.state is state)


PoolMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestPoolHistories = PoolMachine.TestCase


def test_a_unit_is_given_back_only_by_its_owner():
    pool = Pool("pages", 2)
    lease, other = pool.lease(PINNED, 1), pool.lease(PINNED, 1)
    other._units.append(0)
    with pytest.raises(ValueError, match="unit 0 does not belong to 'request'"):
        other.close()
    assert (lease.units, pool._owner[0]) == ((0,), lease)
