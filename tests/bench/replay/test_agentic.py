"""The traffic of a seed: the same each time, and with everything in it that agents do."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from bench.replay.agentic import Traffic, make_calls


@pytest.fixture(scope="module")
def calls():
    return make_calls(Traffic(sessions=40, hours=2, seed=3))


def test_a_seed_makes_the_same_calls_and_another_makes_others(calls):
    assert make_calls(Traffic(40, 2, 3)) == calls
    assert make_calls(Traffic(40, 2, 4)) != calls


def test_calls_are_in_the_order_of_their_time_and_end_with_the_hours(calls):
    assert all(a.at_seconds <= b.at_seconds for a, b in pairwise(calls))
    assert calls[-1].at_seconds < 7200


@pytest.mark.parametrize("kind", ["session", "agent", "fork", "single"])
def test_every_kind_of_thread_is_there(calls, kind):
    assert any(call.thread.startswith(kind) for call in calls)


def test_bodies_are_sent_again(calls):
    again = [call for call in calls if call.thread.endswith(" again")]
    assert again
    assert all(any(call.messages == other.messages for other in calls if other is not call) for call in again)


def test_sub_agents_share_a_preamble(calls):
    preambles = Counter(call.messages[0].content for call in calls if call.thread.startswith("agent"))
    assert preambles.most_common(1)[0][1] > 3


def test_some_history_is_rewritten_and_most_is_not(calls):
    last, rewritten, continued = {}, 0, 0
    for call in calls:
        if call.thread.startswith("session"):
            before = last.get(call.thread, ())
            if call.messages[: len(before)] == before:
                continued += 1
            else:
                rewritten += 1
            last[call.thread] = call.messages
    assert 0 < rewritten < continued / 10


def test_sessions_end_for_good_and_others_begin(calls):
    assert len({call.thread for call in calls if call.thread.startswith("session")}) > 40
