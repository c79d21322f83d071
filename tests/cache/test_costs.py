"""What copies and prefills cost, as it was measured over the last minutes."""

from __future__ import annotations

import pytest

from cache import Costs


def test_nothing_is_known_before_it_was_measured():
    costs = Costs()
    assert (costs.restore_bytes_per_second, costs.prefill_tokens_per_second) == (None, None)


@pytest.mark.parametrize("measured", ["restores", "prefills", "nothing"])
def test_with_a_rate_that_was_never_measured_tokens_are_all_that_counts(measured):
    costs = Costs()
    if measured == "restores":
        costs.saw_restore(10, 1.0, 0.0)
    if measured == "prefills":
        costs.saw_prefill(10, 1.0, 0.0)
    assert costs.seconds_to(10**9, 7) == 7.0


def test_copies_and_tokens_add_up():
    costs = Costs()
    costs.saw_restore(200, 2.0, 0.0)
    costs.saw_prefill(50, 1.0, 0.0)
    assert costs.seconds_to(300, 25) == 3.5
    assert (costs.restore_bytes_per_second, costs.prefill_tokens_per_second) == (100.0, 50.0)


def test_a_long_measurement_weighs_more_than_a_short_one():
    costs = Costs()
    costs.saw_prefill(90, 9.0, 0.0)
    costs.saw_prefill(110, 1.0, 0.0)
    assert costs.prefill_tokens_per_second == 20.0


def test_a_measurement_halves_its_weight_each_minute():
    costs = Costs()
    costs.saw_prefill(80, 4.0, 100.0)
    costs.saw_prefill(70, 1.0, 220.0)
    assert costs.prefill_tokens_per_second == (80 / 4 + 70) / (4 / 4 + 1)


def test_a_restore_that_was_slow_by_chance_is_not_the_last():
    costs = Costs()
    costs.saw_restore(10, 10.0, 100.0)
    costs.saw_prefill(10, 1.0, 160.0)
    assert costs.seconds_to(10, 0) > costs.seconds_to(0, 10)
    costs.saw_prefill(10, 1.0, 161.0)
    assert costs.seconds_to(10, 0) < costs.seconds_to(0, 10)
    assert costs.restore_bytes_per_second == 1.0
    costs.saw_restore(100, 1.0, 162.0)
    assert costs.restore_bytes_per_second == 100.0
    assert costs.seconds_to(100, 0) == 1.0


def test_a_clock_that_went_back_makes_no_measurement_weigh_more():
    costs = Costs()
    costs.saw_prefill(80, 4.0, 100.0)
    costs.saw_prefill(20, 1.0, 40.0)
    assert costs.prefill_tokens_per_second == 20.0


@pytest.mark.parametrize(("amount", "seconds"), [(0, 1.0), (-1, 1.0), (10, 0.0), (10, -1.0)])
def test_a_measurement_of_nothing_says_nothing(amount, seconds):
    costs = Costs()
    costs.saw_restore(100, 1.0, 0.0)
    costs.saw_restore(amount, seconds, 30.0)
    assert costs.restore_bytes_per_second == 100.0
