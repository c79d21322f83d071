"""The detector on labelled streams: a few of them each time, all of them among the slow tests."""

import pytest

from bench.labelled.command import main
from bench.labelled.faults import FaultKind
from bench.labelled.judge import judge
from bench.labelled.observers import ROOTS_IN_A_ROW, Supervisor
from bench.labelled.streams import faulty_stream, faulty_streams, healthy_stream, healthy_streams, recovering_streams
from cache import PoolCounts
from engine.events import ReuseDecided
from tests.ops.insights.house import COLD, GOOD

SOON = 5


@pytest.mark.parametrize(
    ("kind", "seed"),
    [
        (FaultKind.REFUSE_PUBLISH, 1),
        (FaultKind.DROP_STATE, 1),
        (FaultKind.LEAK_HOST_HEALED, 1),
        (FaultKind.STUCK_SLOTS, 0),
        (FaultKind.ONE_NAMESPACE, 1),
        (FaultKind.ONLY_SHARED, 1),
    ],
)
def test_a_fault_is_told_soon_and_not_before_it_is_there(kind, seed):
    verdict = judge(faulty_stream(kind, seed))
    assert verdict.false_alarms == []
    assert verdict.delay_chances is not None
    assert verdict.delay_chances <= SOON


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        ("a working set twice the pools", 0),
        ("more people than fit, a model without states", 0),
        ("a deploy in the middle", 0),
        ("an idle night", 1),
        ("forks of long chats", 1),
        ("a client that rewrites its history", 0),
    ],
)
def test_harmless_traffic_raises_no_alarm(name, seed):
    verdict = judge(healthy_stream(name, seed))
    assert verdict.requests > 100
    assert verdict.false_alarms == []


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
