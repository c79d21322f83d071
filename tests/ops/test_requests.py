"""The ring of the last requests: bounded, and an id finds the newest request that has it."""

import pytest

from engine.events import RequestEnded
from engine.request import FinishReason, Timings, Usage
from ops.requests import RecentRequests


@pytest.fixture
def recent():
    return RecentRequests(capacity=3, unix_time=lambda: 1.5)


def test_the_oldest_makes_room_and_all_its_ids_are_forgotten(recent):
    for index in range(4):
        recent.begin(f"r{index}", "/chat", [f"a{index}", f"b{index}"])
    assert [recent.find(name) for name in ("r0", "a0", "b0")] == [None] * 3
    for index in (1, 2, 3):
        assert recent.find(f"r{index}") is recent.find(f"a{index}") is recent.find(f"b{index}")
    assert len(recent._ring) == 3
    assert len(recent._by_id) == 9


def test_an_id_given_twice_finds_the_newest_and_outlives_the_older(recent):
    recent.begin("same", "/chat", ["a"])
    newest = recent.begin("same", "/chat", ["b"])
    assert recent.find("same") is newest
    recent.begin("r2", "/chat", ["c"])
    recent.begin("r3", "/chat", ["d"])
    assert recent.find("a") is None
    assert recent.find("same") is newest


def ended(answer_id, reason=FinishReason.STOP):
    return RequestEnded(answer_id, reason, Usage(7, 5, 3), Timings(ttft_seconds=0.5), None)


def test_each_answer_ends_by_itself_and_once(recent):
    record = recent.begin("r", "/chat", ["a", "b"])
    assert [each.finish for each in record.answers] == [None, None]
    end = ended("a", FinishReason.CANCELLED)
    assert recent.end(end) is record
    assert recent.end(end) is None, "there is one end"
    assert [each.ended for each in record.answers] == [end, None]
    assert [each.finish for each in record.answers] == [FinishReason.CANCELLED, None]
    assert (record.outcome, record.started_unix_ms) == (None, 1500)


def test_an_answer_that_never_began_here_is_nobodys(recent):
    assert recent.end(ended("a")) is None


def test_a_request_that_runs_longer_than_it_is_kept_still_ends(recent):
    record = recent.begin("long", "/chat", ["a"])
    for index in range(3):
        recent.begin(f"r{index}", "/chat", [f"b{index}"])
    assert recent.find("long") is None
    assert recent.end(ended("a")) is record


def test_the_newest_come_first_and_no_more_than_asked_for(recent):
    for index in range(4):
        recent.begin(f"r{index}", "/chat", [f"a{index}"])
    assert [each.request_id for each in recent.newest(2)] == ["r3", "r2"]
    assert [each.request_id for each in recent.newest(9)] == ["r3", "r2", "r1"]
