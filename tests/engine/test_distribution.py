"""A distribution counts each value once, at the first bound that is not below it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.distribution import LATENCY_BOUNDS_SECONDS, OVERHEAD_BOUNDS_SECONDS, Distribution

seconds = st.floats(min_value=0, max_value=1000, allow_nan=False)


@pytest.mark.parametrize(
    ("value", "place"), [(-1, 0), (0, 0), (1, 0), (1.0001, 1), (2, 1), (9.9, 2), (10, 2), (10.1, 3), (1e9, 3)]
)
def test_a_value_is_counted_at_the_first_bound_that_holds_it(value, place):
    distribution = Distribution((1, 2, 10))
    distribution.observe(value)
    view = distribution.view()
    assert view.counts == tuple(int(index == place) for index in range(4))
    assert view.cumulative_counts == tuple(int(index >= place) for index in range(4))
    assert (view.bounds, view.count, view.sum) == ((1, 2, 10), 1, value)


def test_an_empty_one_has_every_bound_at_zero():
    view = Distribution(LATENCY_BOUNDS_SECONDS).view()
    assert view.cumulative_counts == (0,) * (len(LATENCY_BOUNDS_SECONDS) + 1)
    assert (view.count, view.sum) == (0, 0)


@given(st.lists(st.tuples(seconds, st.integers(0, 5))))
def test_it_says_what_counting_by_hand_says(observed):
    distribution = Distribution(LATENCY_BOUNDS_SECONDS)
    for value, count in observed:
        distribution.observe(value, count)
    view = distribution.view()
    for bound, below in zip((*LATENCY_BOUNDS_SECONDS, float("inf")), view.cumulative_counts, strict=True):
        assert below == sum(count for value, count in observed if value <= bound)
    assert view.count == view.cumulative_counts[-1]
    assert view.sum == pytest.approx(sum(value * count for value, count in observed))


def test_a_view_stays_as_it_was():
    distribution = Distribution((1,))
    before = distribution.view()
    distribution.observe(0.5, count=3)
    assert before.counts == (0, 0)
    assert distribution.view().counts == (3, 0)


@pytest.mark.parametrize("bounds", [(), (1, 1), (2, 1)])
def test_bounds_that_do_not_ascend_are_refused(bounds):
    with pytest.raises(ValueError, match="ascend"):
        Distribution(bounds)


def test_the_shared_bounds_reach_from_a_millisecond_to_ten_minutes():
    assert (LATENCY_BOUNDS_SECONDS[0], LATENCY_BOUNDS_SECONDS[-1]) == (0.001, 600)
    assert set(LATENCY_BOUNDS_SECONDS) < set(OVERHEAD_BOUNDS_SECONDS)
