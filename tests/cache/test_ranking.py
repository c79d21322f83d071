"""Which checkpoint gives way next."""

import itertools
import random
from dataclasses import dataclass, field

import pytest

import cache.ranking
from cache.ranking import Ranking
from cache.regret import Regret
from cache.returns import ReturnRates, group_of
from cache.types import CheckpointKind

KINDS = list(CheckpointKind)
_numbers = itertools.count(1)


@dataclass
class Entry:
    namespace: str = "a"
    kind: CheckpointKind = CheckpointKind.PRIVATE_TURN_CLOSURE
    turns: int = 1
    uses: int = 0
    frontier_tokens: int = 4096
    is_superseded: bool = False
    is_plain: bool = False
    benefit_tokens: int = 4096
    last_used_at: float = 0.0
    number: int = field(default_factory=lambda: next(_numbers))


@pytest.fixture
def ranking():
    return Ranking(ReturnRates(), Regret())


def filled(ranking, *entries):
    for entry in entries:
        ranking.add(entry)
    return ranking


def order_of(ranking, now):
    """All entries in the order in which they give way at one time."""
    order = []
    while (entry := ranking.least(now)) is not None:
        ranking.remove(entry)
        order.append(entry)
    return order


def test_nothing_gives_way_in_an_empty_ranking(ranking):
    assert ranking.least(0.0) is None
    assert ranking.least(0.0, "a") is None


def test_superseded_entries_give_way_first_and_the_oldest_of_them_before_the_others(ranking):
    worthless = Entry(benefit_tokens=1)
    young, old = (Entry(is_superseded=True, benefit_tokens=10**6, last_used_at=at) for at in (50.0, 20.0))
    filled(ranking, worthless, young, old)
    assert order_of(ranking, 60.0) == [old, young, worthless]


@pytest.mark.parametrize(
    ("gives_way", "stays"),
    [
        pytest.param(Entry(benefit_tokens=1000), Entry(benefit_tokens=5000), id="saves less"),
        pytest.param(Entry(turns=1), Entry(turns=8), id="first turn"),
        pytest.param(Entry(last_used_at=-90_000.0), Entry(benefit_tokens=64), id="idle for a day"),
        pytest.param(Entry(last_used_at=99.0), Entry(last_used_at=40.0), id="too fresh to be back soon"),
        pytest.param(Entry(kind=CheckpointKind.PRIVATE_LONG_ANCHOR), Entry(), id="anchor"),
        pytest.param(
            Entry(kind=CheckpointKind.SHARED_BRANCH),
            Entry(kind=CheckpointKind.SHARED_BRANCH, uses=20),
            id="shared but never used",
        ),
    ],
)
def test_what_is_expected_to_save_less_for_its_time_gives_way(gives_way, stays):
    for entries in ((gives_way, stays), (stays, gives_way)):
        ranking = filled(Ranking(ReturnRates(), Regret()), *entries)
        assert ranking.least(100.0) is gives_way
        assert ranking.value(gives_way, 100.0) < ranking.value(stays, 100.0)


def test_of_equals_the_oldest_gives_way(ranking):
    entries = [Entry(last_used_at=float(at)) for at in (2, 0, 3, 1)]
    filled(ranking, *entries)
    assert [entry.last_used_at for entry in order_of(ranking, 100.0)] == [0.0, 1.0, 2.0, 3.0]


def test_value_is_the_benefit_times_the_density_of_returns(ranking):
    entry = Entry(benefit_tokens=3000, last_used_at=10.0)
    expected = 3000 * ReturnRates().density(group_of(entry), 40.0)
    assert ranking.value(entry, 50.0) == pytest.approx(expected)
    ranking.add(entry)
    assert ranking.value(entry, 50.0) == pytest.approx(expected)
    assert ranking.value(Entry(is_superseded=True), 50.0) == 0.0


def test_what_was_learned_changes_the_order_of_what_is_ranked_already():
    rates = ReturnRates()
    ranking = Ranking(rates, Regret())
    chat, tool_loop = Entry(frontier_tokens=1000, last_used_at=1.0), Entry(frontier_tokens=9000, last_used_at=1.0)
    filled(ranking, chat, tool_loop)
    assert ranking.least(3.0) is tool_loop
    for _ in range(200):
        rates.arrived(tool_loop)
        rates.returned(tool_loop, 3.0)
    assert ranking.least(3.0) is chat


def test_a_feature_that_changes_meanwhile_counts_from_the_next_add(ranking):
    entry, other = Entry(benefit_tokens=2000), Entry(benefit_tokens=3000)
    filled(ranking, entry, other)
    entry.benefit_tokens, entry.turns, entry.namespace, entry.last_used_at = 10**6, 8, "b", 50.0
    assert ranking.least(100.0) is entry
    ranking.remove(entry)
    assert ranking.namespaces == {"a"}
    ranking.add(entry)
    assert ranking.least(100.0) is other
    assert ranking.least(100.0, "b") is entry


def test_each_namespace_has_its_own_least_and_count(ranking):
    cheap, dear, elsewhere = Entry(benefit_tokens=100), Entry(), Entry(namespace="b", benefit_tokens=500)
    filled(ranking, cheap, dear, elsewhere)
    assert ranking.least(100.0, "a") is cheap
    assert ranking.least(100.0, "b") is elsewhere
    assert ranking.least(100.0, "c") is None
    assert {name: ranking.count(name) for name in (*ranking.namespaces, "c")} == {"a": 2, "b": 1, "c": 0}
    ranking.remove(elsewhere)
    assert ranking.namespaces == {"a"}
    assert ranking.least(100.0, "b") is None


def test_membership_follows_add_and_remove(ranking):
    entry = Entry()
    assert entry not in ranking
    ranking.add(entry)
    assert entry in ranking
    assert len(ranking) == 1
    with pytest.raises(ValueError, match="ranked already"):
        ranking.add(entry)
    ranking.remove(entry)
    assert entry not in ranking
    assert len(ranking) == 0
    with pytest.raises(KeyError):
        ranking.remove(entry)


def rates_with_valleys():
    """Rates of tool loops: back within a second or after minutes, for each kind and turn."""
    rates = ReturnRates()
    for kind, turns in itertools.product(KINDS, (1, 2, 4, 8)):
        entry = Entry(kind=kind, turns=turns, uses=turns - 1)
        for _ in range(60):
            rates.arrived(entry)
        for seconds in (0.5,) * 25 + (9.0,) * 5 + (200.0,) * 20:
            rates.returned(entry, seconds)
    return rates


@pytest.mark.parametrize("missed_by", [1.5, 3.0])
def test_who_missed_the_quick_return_gives_way_before_who_may_have_it_and_who_nears_the_slow_one(missed_by):
    rates = ReturnRates()
    for seconds in (0.5,) * 300 + (200.0,) * 300:
        rates.arrived(Entry())
        rates.returned(Entry(), seconds)
    ranking = Ranking(rates, Regret())
    missed = Entry(last_used_at=1000.0 - missed_by)
    filled(ranking, missed, *(Entry(last_used_at=1000.0 - idle) for idle in (0.5, 60.0, 150.0)))
    assert ranking.least(1000.0) is missed


@pytest.mark.parametrize(("benefits", "tolerance"), [((4096, 512), 1.0), (range(64, 9000), 2.0)])
def test_the_least_is_the_least_of_all_values(benefits, tolerance):
    """Exactly where the entries of an octave save the same, and within the width of an octave otherwise."""
    random_ = random.Random(7)
    rates = rates_with_valleys()
    assert all(rates.curve(group_of(Entry(kind=kind))).valleys_seconds for kind in KINDS)
    ranking, entries, now = Ranking(rates, Regret()), [], 0.0
    for _ in range(1500):
        now += random_.expovariate(0.5)
        if entries and random_.random() < 0.4:
            ranking.remove(entries.pop(random_.randrange(len(entries))))
        else:
            entries.append(
                Entry(
                    namespace=random_.choice("ab"),
                    kind=random_.choice(KINDS),
                    turns=random_.randint(1, 10),
                    uses=random_.randint(0, 10),
                    benefit_tokens=random_.choice(benefits),
                    last_used_at=now - random_.choice((0.0, 0.0, 5.0, 40.0, 400.0)),
                )
            )
            ranking.add(entries[-1])
        for name in (None, "a", "b"):
            values = [ranking.value(entry, now) for entry in entries if name in (None, entry.namespace)]
            least = ranking.least(now, name)
            assert (least is None) == (values == [])
            assert least is None or ranking.value(least, now) <= tolerance * min(values)


def test_finding_the_least_looks_at_no_more_entries_when_there_are_more(monkeypatch):
    looked_at = 0

    def count_calls(idle_seconds):
        nonlocal looked_at
        looked_at += 1
        return idle_bin(idle_seconds)

    idle_bin = cache.ranking.idle_bin
    monkeypatch.setattr(cache.ranking, "idle_bin", count_calls)
    looks = []
    for size in (1000, 20_000):
        ranking = Ranking(rates_with_valleys(), Regret())
        for number in range(size):
            ranking.add(Entry(turns=1 + number % 9, last_used_at=600.0 * number / size))
        looked_at = 0
        ranking.least(600.0)
        looks.append(looked_at)
    assert looks[1] <= 1.2 * looks[0]
