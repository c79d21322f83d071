"""Why an answer took as long as it did, in words that follow from what was measured."""

import pytest

from cache import CheckpointKind, LossReason, ReuseReport
from engine.errors import QueueTimeoutError
from engine.events import RequestEnded
from engine.request import FinishReason, Timings, Usage
from ops.explanation import explain

TIMINGS = Timings(0.001, 0.0, 0.5, 0.501, 1.0, 1.501)


def report(cached=0, lost=None, expected=0, diverged_at=None, path="root"):
    source = {"device": cached, "host": 0, "disk": 0}
    fault = (lost or {}).get("publish_skipped", 0) if expected else 0
    return ReuseReport(path, 1000, cached, expected, source, lost or {}, diverged_at, expected, fault)


def said(reuse=None, timings=TIMINGS, reason=FinishReason.STOP, error=None, completion=11):
    usage = completion if isinstance(completion, Usage) else Usage(1000, completion)
    return " ".join(explain(RequestEnded("a", reason, usage, timings, reuse, error)))


def test_a_cold_prompt_was_computed():
    assert said(report(lost={"cold": 999})) == (
        "Nothing of its 1,000 prompt tokens was reused. Computing the other 1,000 took 500 ms, 2,000 a second. "
        "999 tokens had never been seen before. Its 11 tokens came within 1.0 s, 10.0 a second."
    )


def test_a_hit_says_what_was_reused():
    words = said(report(900, path="private_turn_closure"))
    assert "Of its 1,000 prompt tokens 900 were reused: all up to the last turn of its conversation." in words


@pytest.mark.parametrize("kind", CheckpointKind)
def test_each_path_has_words(kind):
    assert "prompt tokens 900 were reused: " in said(report(900, path=kind))


@pytest.mark.parametrize("reason", LossReason)
def test_each_reason_that_matters_has_words(reason):
    assert "300 tokens " in said(report(lost={reason.value: 300}))
    assert "9 tokens" not in said(report(lost={reason.value: 9})), "what hardly matters is left out"


def test_what_was_lost_without_need_is_the_daemons_fault():
    assert "room of 900 of them" in said(report(expected=900, lost={"publish_skipped": 900}))


def test_what_a_plain_cache_would_have_saved_is_told():
    assert "would have saved 900 more" in said(report(expected=900, lost={"evicted_state": 900}))
    assert "plain cache" not in said(report(900, expected=900))


def test_a_rewritten_history_names_the_place():
    assert "ends at token 120" in said(report(lost={"diverged": 800}, diverged_at=120))


def test_waiting_and_copying_are_told_where_they_took_long():
    slow = Timings(2.5, 0.25, 0.5, 3.0, 1.0, 4.0)
    assert "It waited 2.5 s for room" in said(report(), slow)
    assert "Copying what it reuses took 250 ms." in said(report(), slow)
    assert "waited" not in said(report())


def test_standing_behind_other_prompts_is_told_apart_from_computing():
    words = said(report(998), Timings(0.0, 0.0, 0.004, 12.7, 1.0, 13.7, stalled_seconds=12.696))
    assert "For 12.7 s it stood behind other prompts, which were computed meanwhile." in words
    assert "Computing the other 2 took 4 ms" in words
    assert "stood behind" not in said(report(), Timings(0.0, 0.0, 0.5, 0.5, 1.0, 1.5, stalled_seconds=0.04))


@pytest.mark.parametrize(("times", "word"), [(1, "once"), (2, "twice"), (3, "3 times")])
def test_being_set_aside_is_told_apart_from_decoding(times, word):
    timings = Timings(0.0, 0.0, 0.5, 0.5, 1.0, 7.6, stalled_seconds=0.0, preempted_seconds=6.1)
    words = said(report(), timings, completion=Usage(1000, 11, 0, preemptions=times, recomputed_tokens=1204))
    assert f"It was set aside {word}, because others needed its room, and lost 6.1 s by it; 1,204 of its" in words
    assert "tokens were computed again. Its 11 tokens came within 1.0 s, 10.0 a second." in words
    assert "set aside" not in said(report())


def test_a_prefill_that_was_cut_off_is_not_told_as_a_whole():
    assert "Computing" not in said(report(), Timings(0.0, 0.0, 0.25, None, None, 0.25), FinishReason.CANCELLED)


def test_one_that_was_never_let_in():
    timings = Timings(total_seconds=60.0)
    words = said(None, timings, FinishReason.ERROR, QueueTimeoutError("late"), completion=0)
    assert words == "It waited 60.0 s and was never let in. It failed: QueueTimeoutError."


def test_a_client_that_left():
    assert said(report(), reason=FinishReason.CANCELLED).endswith("Its client left before the end.")
