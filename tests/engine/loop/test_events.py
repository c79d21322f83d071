"""What an observer of the engine is told: one end for each request, whatever the exit, and what befalls the books."""

import pytest

from cache import Fault, Tier
from engine.engine import Engine, EngineOptions, FinishReason, GenerationRequest, SamplingParams
from engine.errors import EngineUnavailableError, QueueTimeoutError
from engine.events import AuditDone, CacheReset, LoopRestarted, RequestEnded, ReuseDecided, StepFailed
from tests.engine.loop.conftest import SMALL
from tests.waiting import let_it_work

pytestmark = pytest.mark.anyio

PROMPT = tuple(range(40))


def asking(name, prompt=PROMPT, **sampling):
    return GenerationRequest(name, prompt, SamplingParams(**{"max_tokens": 3, "ignore_eos": True, **sampling}))


class Watched:
    """What was told of an engine. Mutable."""

    def __init__(self, engine):
        self.engine = engine
        self.told = []
        engine.observe(self.told.append)

    def of(self, kind):
        return [event for event in self.told if isinstance(event, kind)]

    def ends(self):
        return {event.request_id: event for event in self.of(RequestEnded)}

    async def run(self, name, **options):
        async for _ in self.engine.submit(asking(name, **options)):
            pass

    async def until(self, kind, count=1):
        while len(self.of(kind)) < count:
            await let_it_work()


@pytest.fixture
async def watched(running_engine):
    async with running_engine() as engine:
        yield Watched(engine)


async def test_an_answer_that_ends_by_itself(watched):
    await watched.run("a")
    (end,) = watched.of(RequestEnded)
    assert (end.request_id, end.finish_reason, end.error) == ("a", FinishReason.LENGTH, None)
    assert (end.usage.prompt_tokens, end.usage.completion_tokens) == (40, 3)
    assert end.timings.total_seconds >= end.timings.ttft_seconds >= end.timings.queue_seconds >= 0
    assert end.reuse.lost == {"cold": 39}


async def test_reuse_is_told_when_it_is_decided_and_before_the_end(watched):
    await watched.run("a")
    await watched.run("b")
    decided = watched.of(ReuseDecided)
    assert [(each.request_id, each.reuse.cached_tokens) for each in decided] == [("a", 0), ("b", 39)]
    assert decided[1].reuse.expected_tokens == 39
    ends = watched.ends()
    assert watched.told.index(decided[1]) < watched.told.index(ends["b"])
    assert ends["b"].reuse is decided[1].reuse


async def test_a_client_that_leaves_while_it_decodes_and_one_that_leaves_the_queue(watched):
    decoding = watched.engine.submit(asking("decoding", max_tokens=200))
    await anext(decoding)
    waiting = watched.engine.submit(asking("waiting"))
    await waiting.aclose()
    await decoding.aclose()
    await watched.until(RequestEnded, 2)
    ends = watched.ends()
    assert {end.finish_reason for end in ends.values()} == {FinishReason.CANCELLED}
    assert ends["decoding"].usage.completion_tokens > 0
    assert ends["decoding"].timings.ttft_seconds is not None
    assert (ends["waiting"].reuse, ends["waiting"].timings.queue_seconds) == (None, None)
    assert ends["waiting"].timings.total_seconds >= 0


async def test_one_that_waited_too_long(running_engine):
    async with running_engine(max_concurrency=1, pending_timeout_s=0.01) as engine:
        watched = Watched(engine)
        seated = engine.submit(asking("seated", max_tokens=200))
        await anext(seated)
        with pytest.raises(QueueTimeoutError):
            await watched.run("late")
        end = watched.ends()["late"]
        assert (end.finish_reason, type(end.error)) == (FinishReason.ERROR, QueueTimeoutError)
        assert end.usage.prompt_tokens == 40
        await seated.aclose()


async def test_a_step_that_fails_and_a_loop_that_begins_anew(watched):
    await watched.engine.set_faults(frozenset({Fault.STEP_FAIL}))
    for number in range(3):
        with pytest.raises(EngineUnavailableError):
            await watched.run(f"r{number}")
    failures = watched.of(StepFailed)
    assert [(each.requests, each.consecutive) for each in failures] == [(1, 1), (1, 2), (1, 3)]
    assert len(watched.of(LoopRestarted)) == 1
    assert {end.finish_reason for end in watched.ends().values()} == {FinishReason.ERROR}
    assert len(watched.of(RequestEnded)) == 3


async def test_an_engine_that_stops_ends_what_it_had(tiny_folder):
    engine = Engine.load(tiny_folder, EngineOptions(**SMALL))
    await engine.start()
    watched = Watched(engine)
    answers = [engine.submit(asking(name, max_tokens=200)) for name in "abc"]
    await anext(answers[0])
    await engine.stop()
    assert {name: end.finish_reason for name, end in watched.ends().items()} == dict.fromkeys("abc", FinishReason.ERROR)


async def test_audits_and_resets(watched):
    await watched.run("a")
    report = await watched.engine.audit_cache()
    assert watched.of(AuditDone)[-1].report is report
    await watched.engine.reset_cache([Tier.HOST])
    assert watched.of(CacheReset) == [CacheReset((Tier.HOST,))]


async def test_an_observer_that_fails_harms_nobody(watched, caplog):
    def fail(event):
        raise ZeroDivisionError

    watched.engine.observe(fail)
    await watched.run("a")
    assert "an observer of the engine failed at ReuseDecided" in caplog.text
    assert watched.engine.check() == []


async def test_a_census_names_the_largest_and_says_how_old_the_oldest_is(watched):
    await watched.run("short", prompt=PROMPT[:20])
    await watched.run("long")
    census = watched.engine.census(1)
    assert census.checkpoints >= 2
    assert census.depth_tokens >= 39
    assert [each.tokens for each in census.largest] == [39]
    assert census.largest[0].tiers[0] is Tier.DEVICE
    ages = watched.engine.snapshot().oldest_entry_seconds
    assert set(ages) == set(watched.engine.snapshot().pools), "a pool without an entry is there too"
    assert all(age >= 0 for age in ages.values())
