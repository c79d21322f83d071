"""Each event is stamped once and reaches every sink, whatever another sink does."""

import logging

import pytest

from engine.errors import EngineUnavailableError, QueueTimeoutError, RequestError
from engine.request import FinishReason, Timings
from ops.events import RequestStart, Result
from ops.journal import Journal
from tests.ops.event_samples import CHAT, WHOLE_TIMINGS, audit, ended, reuse_report, terminal_event

EVENT = RequestStart("req-1", "chatcmpl-1", CHAT)


class Kept:
    def __init__(self):
        self.records = []

    def write(self, record):
        self.records.append(record)


class Broken:
    def __init__(self):
        self.is_broken = True

    def write(self, record):
        if self.is_broken:
            raise OSError("no")


def test_every_sink_gets_the_same_record():
    first, second = Kept(), Kept()
    Journal([first, second], "instance-1", lambda: 1.2345).tell(EVENT)
    [record] = first.records
    assert second.records[0] is record
    assert (record.event, record.stamp.timestamp_unix_ms, record.stamp.server_instance_id) == (
        EVENT,
        1234,
        "instance-1",
    )


def test_a_sink_that_fails_harms_no_other_and_is_told_once_for_each_time_that_it_breaks(caplog):
    broken, kept = Broken(), Kept()
    journal = Journal([broken, kept], "instance-1")
    with caplog.at_level(logging.ERROR, "dalsegno.events"):
        for is_broken in (True, True, False, True):
            broken.is_broken = is_broken
            journal.tell(EVENT)
    assert len(kept.records) == 4
    assert len(caplog.records) == 2


@pytest.mark.parametrize(
    ("finish", "error", "kind", "code", "error_type"),
    [
        (FinishReason.STOP, None, "request_done", None, None),
        (FinishReason.LENGTH, None, "request_done", None, None),
        (FinishReason.CANCELLED, None, "request_done", None, None),
        (FinishReason.ERROR, QueueTimeoutError("x"), "request_error", "queue_timeout", "QueueTimeoutError"),
        (FinishReason.ERROR, EngineUnavailableError("x"), "request_error", "engine_unavailable", None),
        (FinishReason.ERROR, RequestError("x"), "request_error", "internal_error", "RequestError"),
        (FinishReason.ERROR, None, "request_error", "internal_error", "internal_error"),
    ],
)
def test_every_end_is_one_of_two_events(finish, error, kind, code, error_type):
    event = terminal_event(ended(finish, reuse=reuse_report(), error=error), "req-1", CHAT)
    assert (event.KIND, event.request_id, event.answer_id, event.endpoint) == (kind, "req-1", "chatcmpl-1", CHAT)
    assert event.result.finish_reason == finish.value
    assert getattr(event, "code", None) == code
    if error_type:
        assert event.error_type == error_type


def test_a_result_says_what_was_reused_and_why_the_rest_was_not():
    event = terminal_event(ended(reuse=reuse_report(diverged_at=17)), "req-1", CHAT)
    assert event.result == Result(
        finish_reason="stop",
        prompt_tokens=3903,
        completion_tokens=40,
        cached_tokens=3898,
        computed_prefill_tokens=5,
        achievable_tokens=3900,
        expected_tokens=3898,
        reuse="private_turn_closure",
        source={"device": 3898, "host": 0, "disk": 0},
        lost={"no_checkpoint": 2},
        diverged_at=17,
        preemptions=2,
        recomputed_tokens=250,
    )
    timings = event.timings_seconds
    found = (timings.queue, timings.restore, timings.prefill, timings.ttft, timings.decode, timings.total)
    assert found == (0.01, 0.02, 0.1, 0.212, 1.0, 1.3)
    assert (timings.stalled, timings.preempted) == (0.07, 0.1)


def test_what_was_computed_is_not_told_of_a_prefill_that_was_cut_off():
    cut = Timings(queue_seconds=0.1, total_seconds=0.4)
    event = terminal_event(ended(FinishReason.CANCELLED, reuse=reuse_report(), timings=cut), "req-1", CHAT)
    assert event.result.computed_prefill_tokens is None
    assert event.result.cached_tokens == 3898
    whole = terminal_event(ended(FinishReason.CANCELLED, reuse=reuse_report(), timings=WHOLE_TIMINGS), "req-1", CHAT)
    assert whole.result.computed_prefill_tokens == 5


def test_an_audit_is_told_in_numbers():
    event = audit(violations=3, reclaimed=2)
    assert (event.violations, event.reclaimed, event.remaining, event.audit_seconds) == (3, {"host_units": 2}, 0, 0.25)
    assert event.has_found_something
    assert not audit(violations=0, reclaimed=0).has_found_something
