"""The detector on labelled streams: a few of them each time, all of them among the slow tests."""

from functools import cache

import pytest

from bench.labelled.command import SOON, main
from bench.labelled.faults import FaultKind
from bench.labelled.judge import Verdict, judge
from bench.labelled.observers import ROOTS_IN_A_ROW, Supervisor
from bench.labelled.orders import SHARES, order_stream
from bench.labelled.streams import faulty_stream, faulty_streams, healthy_stream, healthy_streams, recovering_streams
from bench.labelled.traffic import Order
from cache import PoolCounts
from engine.events import ReuseDecided
from tests.ops.insights.house import COLD, GOOD


@cache
def twin_of(order, share):
    """The same whatever the kind of fault that it goes without."""
    return judge(order_stream(None, order, share, room=1, seed=4))


@pytest.mark.parametrize("kind", [FaultKind.REFUSE_PUBLISH, FaultKind.DROP_STATE, FaultKind.INDEX_FORGETS])
@pytest.mark.parametrize(("order", "share"), [(Order.ROTATION, 0.5), (Order.ROTATION, 1.5), (Order.RANDOM, 0.5)])
def test_a_fault_is_told_soon_and_not_before_it_is_there_whatever_the_order(kind, order, share):
    """More people than fit, in rotation, is the worst that there is for LRU."""
    stream = order_stream(kind, order, share, room=1, seed=4)
    twin = twin_of(order, share)
    verdict = judge(stream, twin)
    assert verdict.false_alarms == twin.false_alarms == []
    assert verdict.degraded_delay is not None
    assert verdict.degraded_delay <= SOON


@pytest.mark.parametrize(
    ("kind", "order", "share"),
    [
        (FaultKind.STUCK_SLOTS, Order.BY_LENGTH, 1.0),
        (FaultKind.LEAK_HOST_HEALED, Order.BURSTS, 1.0),
        (FaultKind.RESTORE_FAIL, Order.ROTATION, 1.0),
        (FaultKind.ONLY_SHARED, Order.RANDOM, 0.5),
        (FaultKind.ONE_NAMESPACE, Order.ONE_OF_MANY, 0.25),
        (FaultKind.ONE_REFUSED, Order.ONE_OF_MANY, 0.5),
        (FaultKind.REFUSE_PUBLISH, Order.LOCKSTEP, 0.5),
    ],
)
def test_each_kind_of_fault_is_told_soon(kind, order, share):
    verdict = judge(order_stream(kind, order, share, room=1, seed=4))
    assert verdict.false_alarms == []
    assert verdict.delay is not None
    assert verdict.delay <= SOON


@pytest.mark.parametrize(
    "name",
    [
        "more people than fit, a model without states",
        "a deploy in the middle",
        "prompts of half the pages that come and go within a second",
        "a client that rewrites its history",
    ],
)
def test_harmless_traffic_raises_no_alarm(name):
    verdict = judge(healthy_stream(name, 0))
    assert verdict.requests > 100
    assert verdict.false_alarms == []


@pytest.mark.parametrize("share", SHARES[::2])
def test_people_in_rotation_raise_no_alarm_however_many_they_are(share):
    assert judge(order_stream(None, Order.ROTATION, share, room=1, seed=4)).false_alarms == []


@pytest.mark.parametrize(("share", "room"), [(0.5, 3), (1.0, 4)])
def test_people_who_begin_anew_all_at_once_raise_no_alarm(share, room):
    assert judge(order_stream(None, Order.LOCKSTEP, share, room, seed=0)).false_alarms == []


def test_an_alarm_of_the_twin_counts_as_one_of_the_stream():
    stream = order_stream(FaultKind.REFUSE_PUBLISH, Order.ROTATION, 0.25, room=3, seed=4)
    assert not judge(stream, Verdict(stream.twin, false_alarms=["degraded"])).is_right


def test_a_stream_is_the_same_whenever_it_is_made():
    assert faulty_stream(FaultKind.ONE_NAMESPACE, 1) == faulty_stream(FaultKind.ONE_NAMESPACE, 1)
    assert faulty_stream(FaultKind.ONE_NAMESPACE, 1).calls != faulty_stream(FaultKind.ONE_NAMESPACE, 2).calls


def test_there_are_at_least_thirty_of_each_kind():
    assert sum(1 for _ in faulty_streams(range(3))) >= 30
    assert sum(1 for _ in healthy_streams(range(2))) >= 30


def test_the_supervisors_rule_wants_exact_equality_and_any_hit_clears_it():
    full, all_but_one = PoolCounts(24, 0, 24, 0, 0), PoolCounts(24, 1, 23, 0, 0)
    for states, alarms in ((full, True), (all_but_one, False)):
        rule = Supervisor()
        for number in range(ROOTS_IN_A_ROW):
            assert not rule.is_alarmed
            rule.saw(ReuseDecided("", "", COLD), float(number), states)
        assert rule.is_alarmed is alarms
        rule.saw(ReuseDecided("", "", GOOD), 9.0, states)
        assert not rule.is_alarmed


@pytest.mark.slow
def test_every_stream_is_judged_right(tmp_path, capsys):
    assert main(["--markdown", str(tmp_path / "tables.md")]) == 0
    assert (tmp_path / "tables.md").read_text(encoding="utf-8") in capsys.readouterr().out


@pytest.mark.slow
def test_reuse_is_healthy_again_after_the_cause_is_gone():
    for stream in recovering_streams(range(3)):
        verdict = judge(stream)
        assert verdict.detected_at is not None
        assert verdict.ends_as.value == "healthy"
