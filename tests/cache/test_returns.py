"""What ReturnRates learns from arrivals and returns, against the definition of its density."""

from dataclasses import dataclass

import pytest

from cache.returns import (
    IDLE_BINS,
    IDLE_SHARE,
    LENGTH_FACTOR,
    MEMORY_ARRIVALS,
    PRIOR_ARRIVALS,
    RETURN_PROBABILITY,
    Group,
    ReturnRates,
    bin_start_seconds,
    group_of,
    idle_bin,
)
from cache.types import CheckpointKind

CLOSURE = CheckpointKind.PRIVATE_TURN_CLOSURE
STABLE = CheckpointKind.SHARED_STABLE_PREFIX


@dataclass
class Entry:
    kind: CheckpointKind = CLOSURE
    turns: int = 1
    uses: int = 0
    frontier_tokens: int = 1000


def density_by_definition(arrivals, returns, idle_seconds):
    """Expected returns per second, for the best time to give up, where returns fall on the middle of their bins."""
    edges = [bin_start_seconds(number) for number in range(IDLE_BINS + 1)]
    first = idle_bin(idle_seconds)
    ratios = []
    for give_up in range(first, IDLE_BINS):
        gained = sum(returns[first : give_up + 1])
        cost = 0.0
        for number in range(first, give_up + 1):
            still_waiting = arrivals - sum(returns[:number])
            cost += (still_waiting - returns[number] / 2) * (edges[number + 1] - edges[number])
        ratios.append(gained / cost)
    return max(ratios)


def prior_of_short_first_turns():
    chance = RETURN_PROBABILITY[0] * LENGTH_FACTOR[0]
    return [PRIOR_ARRIVALS * chance * share for share in IDLE_SHARE]


@pytest.mark.parametrize("idle_seconds", [0.0, 0.5, 3.0, 20.0, 70.0, 1000.0, 50_000.0])
def test_density_is_the_best_ratio_of_expected_returns_to_expected_time(idle_seconds):
    rates, entry, returns = ReturnRates(), Entry(), prior_of_short_first_turns()
    for _ in range(300):
        rates.arrived(entry)
    for seconds, count in ((3.0, 120), (600.0, 60)):
        for _ in range(count):
            rates.returned(entry, seconds)
        returns[idle_bin(seconds)] += count

    expected = density_by_definition(PRIOR_ARRIVALS + 300, returns, idle_seconds)

    assert rates.density(group_of(entry), idle_seconds) == pytest.approx(expected)


def test_before_anything_happened_longer_conversations_are_expected_back_more():
    rates = ReturnRates()
    densities = [rates.density(group_of(Entry(turns=turns)), 30.0) for turns in (1, 2, 4, 8)]
    assert densities == sorted(densities)
    assert densities[-1] > 2 * densities[0]


def test_a_wait_that_usually_ends_later_is_worth_more_the_closer_that_time_comes():
    rates = ReturnRates()
    group = group_of(Entry())
    assert rates.density(group, 1.0) < rates.density(group, 40.0)
    assert rates.density(group, 40.0) > rates.density(group, 1000.0)


def test_what_one_group_does_says_nothing_about_another():
    rates = ReturnRates()
    before = rates.density(group_of(Entry(turns=8)), 2.0)
    for _ in range(50):
        rates.arrived(Entry())
        rates.returned(Entry(), 2.0)
    assert rates.density(group_of(Entry(turns=8)), 2.0) == before


def test_old_habits_are_forgotten_when_the_traffic_changes():
    rates, entry = ReturnRates(), Entry()
    for _ in range(int(MEMORY_ARRIVALS)):
        rates.arrived(entry)
        rates.returned(entry, 3.0)
    keen = rates.density(group_of(entry), 3.0)
    for _ in range(4 * int(MEMORY_ARRIVALS)):
        rates.arrived(entry)
    assert rates.density(group_of(entry), 3.0) < keen / 50


def test_a_habit_that_lasts_is_not_forgotten():
    rates, entry = ReturnRates(), Entry()
    for number in range(5 * int(MEMORY_ARRIVALS)):
        rates.arrived(entry)
        if number % 2:
            rates.returned(entry, 3.0)
    half_of_all = density_by_definition(1000, [500 * (number == idle_bin(3.0)) for number in range(IDLE_BINS)], 2.0)
    assert rates.density(group_of(entry), 2.0) == pytest.approx(half_of_all, rel=0.05)


def test_more_returns_than_arrivals_stay_a_finite_rate():
    rates, entry = ReturnRates(), Entry()
    for _ in range(10_000):
        rates.returned(entry, 0.2)
    assert 0 < rates.density(group_of(entry), 0.2) < 100


def test_a_used_shared_prefix_waits_on_among_those_used_once_more():
    rates = ReturnRates()
    fresh, used = Group(STABLE, 0, 0), Group(STABLE, 1, 0)
    before = rates.density(used, 100.0)
    for _ in range(100):
        rates.returned(Entry(kind=STABLE, uses=0), 5.0)
    assert rates.density(fresh, 4.0) > rates.density(used, 4.0)
    assert rates.density(used, 100.0) == pytest.approx(before / 2, rel=0.1)


def test_a_used_private_checkpoint_waits_no_longer():
    rates = ReturnRates()
    before = rates.density(Group(CLOSURE, 1, 0), 100.0)
    for _ in range(100):
        rates.returned(Entry(uses=0), 5.0)
    assert rates.density(Group(CLOSURE, 1, 0), 100.0) == before


def test_the_curve_tells_where_it_turns_up_again():
    rates, entry = ReturnRates(), Entry()
    for _ in range(1000):
        rates.arrived(entry)
    for seconds, count in ((0.5, 300), (300.0, 300)):
        for _ in range(count):
            rates.returned(entry, seconds)
    curve = rates.curve(group_of(entry))
    [valley] = curve.valleys_seconds
    bottom = idle_bin(valley) - 1
    assert 1.0 < valley <= 256.0
    assert curve.densities[bottom] == min(curve.densities[: idle_bin(300.0) + 1])
    assert curve.densities[bottom] < curve.densities[bottom + 1]


@pytest.mark.parametrize(
    ("entry", "group"),
    [
        (Entry(), Group(CLOSURE, 0, 0)),
        (Entry(turns=3, frontier_tokens=2047), Group(CLOSURE, 1, 0)),
        (Entry(turns=7, frontier_tokens=2048), Group(CLOSURE, 2, 1)),
        (Entry(turns=8, frontier_tokens=8192), Group(CLOSURE, 3, 2)),
        (Entry(turns=900, frontier_tokens=250_000), Group(CLOSURE, 3, 3)),
        (Entry(frontier_tokens=0), Group(CLOSURE, 0, 0)),
        (Entry(kind=STABLE, frontier_tokens=250_000), Group(STABLE, 0, 0)),
        (Entry(kind=STABLE, uses=6, turns=9), Group(STABLE, 2, 0)),
        (Entry(kind=STABLE, uses=10**6), Group(STABLE, 4, 0)),
    ],
)
def test_groups_are_octaves_of_turns_or_uses_and_of_length(entry, group):
    assert group_of(entry) == group


@pytest.mark.parametrize(
    ("idle_seconds", "number"), [(-1.0, 0), (0.0, 0), (0.99, 0), (1.0, 1), (2.0, 2), (3.99, 2), (4.0, 3), (1e9, 15)]
)
def test_idle_time_is_told_in_octaves(idle_seconds, number):
    assert idle_bin(idle_seconds) == number
