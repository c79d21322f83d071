"""What happens comes in, and events, records, samples and judgements go out."""

import asyncio
from dataclasses import replace

import pytest

from cache import AuditReport, ReuseReport, Tier
from engine.errors import QueueTimeoutError
from engine.events import AuditDone, CacheReset, LoopRestarted, RequestEnded, ReuseDecided, StepFailed
from engine.request import FinishReason, Timings, Usage
from ops.changes import Changes
from ops.health import Health, HealthStatus, Phase
from ops.insights.types import ReuseState
from ops.metrics import Metrics
from ops.operations import Operations, Served
from tests.ops.test_metrics import snapshot

CHAT = "/v1/chat/completions"
OK = Health(HealthStatus.OK)
SERVED = Served("1.2.3", "demo", "qwen3_5", "torch", 4096, 16, 8, 1024, 0.5)


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


class Kept:
    """A sink that keeps what it is told."""

    def __init__(self):
        self.events = []

    def write(self, record):
        self.events.append(record.event)

    @property
    def kinds(self):
        return [event.KIND.value for event in self.events]


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def kept():
    return Kept()


@pytest.fixture
def operations(clock, kept):
    found = Operations(Metrics("1.2.3", [CHAT]), [kept], clock=clock, unix_time=lambda: 1000.0 + clock.now)
    found.started(SERVED, snapshot())
    return found


def report(cached=0, expected=0, path="root"):
    source = {"device": cached, "host": 0, "disk": 0}
    lost = expected - cached
    return ReuseReport(path, 1000, cached, expected, source, {"publish_skipped": lost}, None, expected, lost)


def ended(answer_id, reason=FinishReason.STOP, error=None, reuse=None):
    return RequestEnded(answer_id, reason, Usage(1000, 5, 0), Timings(total_seconds=1.0), reuse, error)


def test_a_start_tells_what_is_served(kept, operations):
    (start,) = kept.events
    assert (start.KIND.value, start.model, start.capacity.host_bytes) == ("server_start", "demo", 9 * 1024)


@pytest.mark.parametrize(
    ("end", "kind"),
    [
        (ended("a"), "request_done"),
        (ended("a", FinishReason.CANCELLED), "request_done"),
        (ended("a", FinishReason.ERROR, QueueTimeoutError("late")), "request_error"),
    ],
)
def test_each_answer_has_one_start_and_one_end(operations, kept, end, kind):
    record = operations.request_began("r", CHAT, ["a", "b"])
    operations.engine_event(end)
    operations.engine_event(end)
    assert kept.kinds[1:] == ["request_start", "request_start", kind]
    told = kept.events[-1]
    assert (told.request_id, told.answer_id, told.endpoint) == ("r", "a", CHAT)
    assert record.answers[0].ended is end
    assert record.answers[1].ended is None


def test_an_answer_that_was_given_up_before_its_request_began_is_no_event(operations, kept):
    operations.engine_event(ended("a", FinishReason.CANCELLED))
    operations.request_rejected("r", CHAT, 429, "server_overloaded")
    assert kept.kinds[1:] == ["request_rejected"]


def test_only_an_audit_is_an_event_of_its_own_among_what_befalls_the_engine(operations, kept):
    for event in (
        CacheReset((Tier.HOST,)),
        StepFailed("RuntimeError", 1, 1),
        LoopRestarted("RuntimeError"),
        AuditDone(AuditReport(("a line",), {"host_units": 3}, ()), 0.25),
    ):
        operations.engine_event(event)
    assert kept.kinds[1:] == ["audit"]
    assert (kept.events[-1].violations, kept.events[-1].reclaimed) == (1, {"host_units": 3})


def test_a_sample_is_taken_when_the_interval_is_over_and_not_before(operations, kept, clock):
    operations.request_began("r", CHAT, ["a"])
    for _ in range(4):
        clock.now += 1
        operations.tick(snapshot(), OK)
    assert "throughput" not in kept.kinds
    clock.now += 1
    operations.tick(snapshot(prefill_tokens_total=70), OK)
    sample = kept.events[-1]
    assert (sample.interval_seconds, sample.tokens.prefill, sample.requests.started) == (5.0, 70, 1)
    (point,) = operations.history.since()
    assert (point.timestamp_unix_ms, point.sample) == (1_105_000, sample)


def test_lost_reuse_opens_an_insight_that_health_shows_and_an_audit_is_asked_for(operations, kept, clock):
    seen = operations.changes.count
    for number in range(8):
        clock.now += 1
        operations.engine_event(ReuseDecided(f"a{number}", "", report(expected=900)))
        operations.tick(snapshot(), OK)
    assert operations.reuse is ReuseState.COLLAPSED
    assert "insight_opened" in kept.kinds
    assert operations.health(Phase.SERVING, 0.1).status is HealthStatus.DEGRADED
    assert operations.changes.count > seen
    assert operations.wants_audit
    operations.engine_event(AuditDone(AuditReport(()), 0.1))
    assert not operations.wants_audit


def test_nothing_new_wakes_nobody(operations, clock):
    operations.tick(snapshot(), OK)
    seen = operations.changes.count
    clock.now += 1
    operations.tick(snapshot(), OK)
    assert operations.changes.count == seen
    operations.tick(snapshot(), Health(HealthStatus.DRAINING, ("so",)))
    assert operations.changes.count == seen + 1


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.mark.anyio
async def test_everyone_who_waits_sees_a_change():
    changes = Changes()
    waiting = [asyncio.create_task(changes.wait(0)) for _ in range(3)]
    await asyncio.sleep(0)
    changes.happened()
    assert await asyncio.gather(*waiting) == [1, 1, 1]
    assert await changes.wait(0) == 1, "one that comes late does not wait"


def test_a_recommended_command_asks_this_daemon(clock, kept):
    operations = Operations(Metrics("1.2.3", [CHAT]), [kept], clock=clock)
    operations.started(replace(SERVED, url="http://10.0.0.7:9000"), snapshot())
    for number in range(8):
        operations.engine_event(ReuseDecided(f"a{number}", "", report(expected=900)))
        operations.tick(snapshot(), OK)
        operations.engine_event(AuditDone(AuditReport(()), 0.1))
        clock.now += 1
        operations.tick(snapshot(), OK)
    insight = next(each for each in operations.active if each.id.startswith("prefix."))
    assert "http://10.0.0.7:9000/admin/" in insight.recommendation
    assert "127.0.0.1" not in insight.recommendation
