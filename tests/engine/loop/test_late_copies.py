"""A running engine whose copies to and from host memory end late: the same answers, and sound books."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from cache import Tier
from engine.copier import StreamCopier
from engine.errors import EngineUnavailableError
from tests.engine.late_stream import LateFlight, LateStream
from tests.engine.loop.test_engine import collect, request
from tests.engine.loop.test_host_tier import HOST, PROMPTS, answers, with_one_in_host

pytestmark = pytest.mark.anyio


class PacedStream(LateStream):
    """Now and then some of the copies that are under way end, between two steps."""

    def __init__(self, chance: Random) -> None:
        super().__init__()
        self.chance = chance
        self.late = 0

    def queue(self, work, after) -> LateFlight:
        flight = super().queue(work, after)
        flight.seconds = 1e-6  # So quick that nothing is computed instead.
        return flight

    def mark(self) -> int:
        for _ in range(self.chance.choice([0, 0, 0, 1, 3])):
            if self.queued:
                self.do_next()
        self.late += len(self.queued)
        return super().mark()


async def slow_down(engine, seed: int) -> PacedStream:
    runner, stream = engine._loop._runner, PacedStream(Random(seed))
    copier = StreamCopier(runner._storage.queue, stream, engine._faults)
    await engine._loop.between_steps(lambda _scheduler: setattr(runner, "_copier", copier))
    return stream


ROOM = {**HOST, "max_concurrency": 4, "kv_pages": 192}


def decode_beside(engine) -> asyncio.Task:
    """Keep the engine computing, so that steps need not wait for copies."""
    return asyncio.create_task(collect(engine.submit(request((7, 8, 9), "beside", max_tokens=100))))


async def test_copies_that_end_late_change_no_token(running_engine):
    async with running_engine(prefix_reuse=False) as engine:
        expected = dict(zip(PROMPTS, (await answers(engine, PROMPTS))[0], strict=True))
    async with running_engine(**ROOM) as engine:
        stream, chance = await slow_down(engine, 1), Random(2)
        rounds = 0
        # How many copies end before the device is emptied is chance, and a busy machine's.
        while (engine.snapshot().cache.restores < 3 or stream.late <= 10) and rounds < 20:
            rounds += 1
            prompts, beside = chance.choices(PROMPTS, k=3), decode_beside(engine)
            generations = [engine.submit(request(prompt, str(place))) for place, prompt in enumerate(prompts)]
            ended = await asyncio.gather(*map(collect, generations))
            assert [token_ids for _, token_ids in ended] == [expected[prompt] for prompt in prompts]
            await beside
            await engine._loop.wait_until_empty()
            await engine.reset_cache([Tier.DEVICE])
            assert engine.check() == []
        assert engine.snapshot().cache.restores >= 3
        assert stream.late > 10


async def test_clients_that_leave_while_copies_are_under_way_leave_nothing_behind(running_engine):
    async with running_engine(**ROOM) as engine:
        expected = dict(zip(PROMPTS, (await answers(engine, PROMPTS))[0], strict=True))
        stream, chance = await slow_down(engine, 3), Random(4)
        for _ in range(4):
            prompts, beside = chance.sample(PROMPTS, k=3), decode_beside(engine)
            leaving = [engine.submit(request(prompt, str(prompt[0]), max_tokens=150)) for prompt in prompts[:2]]
            await anext(leaving[0])
            staying = asyncio.create_task(collect(engine.submit(request(prompts[2]))))
            for generation in leaving:
                await generation.aclose()
            assert (await staying)[1] == expected[prompts[2]]
            await beside
            await engine._loop.wait_until_empty()
            await engine.reset_cache([Tier.DEVICE])
        assert stream.late > 10
        assert engine.snapshot().step_failures_total == 0


async def test_resets_and_audits_while_copies_are_under_way_find_nothing_amiss_and_change_no_token(running_engine):
    async with running_engine(**ROOM) as engine:
        expected = dict(zip(PROMPTS, (await answers(engine, PROMPTS))[0], strict=True))
        stream, chance, found = await slow_down(engine, 8), Random(9), []
        for _ in range(4):
            prompts, beside = chance.choices(PROMPTS, k=3), decode_beside(engine)
            generations = [engine.submit(request(prompt, str(place))) for place, prompt in enumerate(prompts)]
            ended = asyncio.gather(*map(collect, generations))
            while not ended.done():
                if chance.random() < 0.1:
                    await engine.reset_cache(chance.choice([[Tier.DEVICE], [Tier.HOST], [Tier.DEVICE, Tier.HOST]]))
                report = await engine.audit_cache()
                found += [*report.violations, *report.reclaimed]
            assert [token_ids for _, token_ids in await ended] == [expected[prompt] for prompt in prompts]
            await beside
            await engine._loop.wait_until_empty()
        assert found == []
        assert stream.late > 10


def break_the_loop(engine) -> None:
    """The next step that begins a restore which is still under way at its end is the last of its scheduler."""
    runner, run = engine._loop._runner, engine._loop._runner.run

    def run_and_break(plan):
        result = run(plan)
        if any(each.number in result.under_way and each.copies[0].source.tier is Tier.HOST for each in plan.background):
            runner.run = run
            engine._loop.scheduler.apply = lambda *_: 1 / 0
        return result

    runner.run = run_and_break


async def together(engine, prompts) -> list:
    """What each of them ends with, while another decodes."""
    beside = engine.submit(request((7, 8, 9), "beside", max_tokens=100))
    await anext(beside)
    generations = [engine.submit(request(prompt, str(place))) for place, prompt in enumerate(prompts)]
    ended = await asyncio.gather(*map(collect, generations), return_exceptions=True)
    await beside.aclose()
    return ended


async def test_a_loop_that_begins_anew_while_a_restore_is_under_way_gives_the_same_tokens(running_engine):
    async with running_engine(**ROOM) as engine:
        expected = dict(zip(PROMPTS, (await answers(engine, PROMPTS))[0], strict=True))
        stream = await slow_down(engine, 5)
        for restarts in range(1, 5):
            prompt = await with_one_in_host(engine)
            break_the_loop(engine)
            assert [type(each) for each in await together(engine, [prompt])] == [EngineUnavailableError]
            assert engine.snapshot().loop_restarts_total == restarts
            assert stream.queued, "the restore of the former scheduler is not under way any more"
            prompts = [each for each in PROMPTS if each != prompt]
            assert [token_ids for _, token_ids in await together(engine, prompts)] == [
                expected[each] for each in prompts
            ]
            assert engine.check() == []


async def test_nothing_is_copied_any_more_when_the_memory_of_a_stopped_engine_is_given_back(running_engine):
    async with running_engine(**ROOM) as engine:
        stream = await slow_down(engine, 7)
        prompt = await with_one_in_host(engine)
        break_the_loop(engine)
        await together(engine, [prompt])
        assert stream.queued
        await engine.stop()
        engine._loop._thread.shutdown()
        assert not stream.queued
