"""The ring of the last requests: bounded, and an id finds the newest request that has it."""

import pytest

from engine.request import Delta, FinishReason, Timings, Usage
from ops.outcome import Outcome
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


@pytest.mark.parametrize(
    ("outcome", "finish"), [(Outcome.CANCELLED, FinishReason.CANCELLED), (Outcome.ERROR, FinishReason.ERROR)]
)
def test_an_answer_that_did_not_end_by_itself_ends_with_its_request(recent, outcome, finish):
    record = recent.begin("r", "/chat", ["a", "b"])
    ended, cut = record.answers
    usage, timings = Usage(7, 5, 3), Timings(ttft_seconds=0.5)
    ended(Delta("x", (1,)))
    assert ended.finish is None
    ended(Delta("", (), FinishReason.LENGTH, usage, timings))
    record.end(outcome)
    assert (ended.finish, ended.usage, ended.timings) == (FinishReason.LENGTH, usage, timings)
    assert (cut.finish, cut.usage) == (finish, None)
    assert (record.outcome, record.started_unix_ms) == (outcome, 1500)
