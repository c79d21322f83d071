"""Host memory behind a running engine: the same answers, every exit while something is restored, and fire drills."""

import asyncio
import threading
import time
from dataclasses import replace

import pytest

from cache import Fault, LossReason, Tier, audit
from engine.copier import ImmediateCopier
from engine.errors import EngineUnavailableError
from engine.runner import SLOW_STEP_SECONDS
from tests.cache.house import prefix_of
from tests.engine.loop.test_engine import alone, collect, request
from tests.waiting import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

PROMPTS = [tuple(range(start, start + 60)) for start in (0, 60, 120, 180)]
HOST = {"device_state_slots": 1, "max_concurrency": 2, "host_cache_mib": 4, "kv_pages": 64}


async def answers(engine, prompts, **options):
    """Token ids and reuse of each, one after the other."""
    ended = [await collect(engine.submit(request(prompt, **options))) for prompt in prompts]
    return [token_ids for _, token_ids in ended], [deltas[-1].reuse for deltas, _ in ended]


async def with_one_in_host(engine) -> tuple[int, ...]:
    """A prompt that has to be restored."""
    for _ in range(3):
        await alone(engine, PROMPTS)
        await engine._loop.wait_until_empty()
        await engine.reset_cache([Tier.DEVICE])
        for checkpoint in engine._loop.scheduler.cache.tiers.store:
            for prompt in PROMPTS:
                if checkpoint.is_in_host and prefix_of(checkpoint) == prompt[:-1]:
                    return prompt
    raise AssertionError("nothing was demoted")


async def evict_from_host(engine) -> None:
    def evict(scheduler) -> None:
        tiers = scheduler.cache.tiers
        for checkpoint in [each for each in tiers.store if each.is_in_host]:
            tiers.drop_host(checkpoint, LossReason.EVICTED_STATE)

    await engine._loop.between_steps(evict)


@pytest.fixture
def copies(monkeypatch):
    """Restores stand still in the engine thread from `copies.clear()` on, until they are set free."""
    opened, run = threading.Event(), ImmediateCopier._run
    opened.set()
    opened.reached = threading.Event()

    def gated(self, batch):
        if batch.copies[0].source.tier is Tier.HOST:
            opened.reached.set()
            assert opened.wait(timeout=PATIENCE_SECONDS)
        return run(self, batch)

    monkeypatch.setattr(ImmediateCopier, "_run", gated)
    yield opened
    opened.set()


async def reached(event: threading.Event) -> None:
    await asyncio.to_thread(event.wait, 60)


async def test_a_hit_in_host_memory_changes_no_token(running_engine):
    async with running_engine(prefix_reuse=False) as engine:
        expected, _ = await answers(engine, PROMPTS)
    async with running_engine(**HOST) as engine:
        prompt = await with_one_in_host(engine)
        (token_ids,), (reuse,) = await answers(engine, [prompt])
        assert token_ids == expected[PROMPTS.index(prompt)]
        assert reuse.source[Tier.HOST] == len(prompt) - 1
        snapshot = engine.snapshot()
        assert snapshot.restore_bytes_per_second > 0
        assert snapshot.cache.restores == 1


async def test_snapshots_count_what_host_memory_holds(running_engine):
    async with running_engine(**HOST) as engine:
        await with_one_in_host(engine)
        snapshot = engine.snapshot()
        assert snapshot.host_units.cached > 0
        assert snapshot.host_state_slots.cached > 0
        for pool in (snapshot.host_units, snapshot.host_state_slots):
            assert pool.free + pool.cached == pool.capacity
        assert snapshot.host_units.capacity * engine.memory.host_unit_bytes <= 4 * 2**20


async def test_host_memory_can_be_switched_off(running_engine):
    async with running_engine(**{**HOST, "host_cache_mib": 0}) as engine:
        await alone(engine, PROMPTS)
        assert engine.snapshot().host_units.capacity == engine.snapshot().host_state_slots.capacity == 0


async def test_a_client_that_leaves_while_its_prefix_is_restored_leaves_nothing_behind(running_engine, copies):
    async with running_engine(**HOST) as engine:
        prompt = await with_one_in_host(engine)
        copies.clear()
        generation = engine.submit(request(prompt))
        await reached(copies.reached)
        assert engine.snapshot().restoring == 1
        await generation.aclose()
        copies.set()
        await engine._loop.wait_until_empty()
        snapshot = engine.snapshot()
        assert snapshot.running == 0
        assert {(pool.pinned, pool.in_flight) for pool in (snapshot.host_units, snapshot.host_state_slots)} == {(0, 0)}
        assert (await answers(engine, [prompt]))[1][0].source[Tier.HOST] == len(prompt) - 1


async def test_an_engine_that_stops_while_it_restores_tells_the_client(running_engine, copies):
    async with running_engine(**HOST) as engine:
        prompt = await with_one_in_host(engine)
        copies.clear()
        generation = engine.submit(request(prompt))
        await reached(copies.reached)
        stopping = asyncio.create_task(engine.stop())
        await asyncio.sleep(0)
        copies.set()
        await stopping
        with pytest.raises(EngineUnavailableError):
            await collect(generation)
        assert engine.check() == []


async def test_a_restore_that_fails_is_computed_instead_told_and_logged(running_engine, caplog):
    async with running_engine(**HOST) as engine:
        expected = dict(zip(PROMPTS, (await answers(engine, PROMPTS))[0], strict=True))
        prompt = await with_one_in_host(engine)
        await engine.set_faults(frozenset({Fault.RESTORE_FAIL}))
        (token_ids,), (reuse,) = await answers(engine, [prompt])
        assert (token_ids, reuse.path, reuse.lost) == (expected[prompt], "root", {"restore_failed": len(prompt) - 1})
        assert sum("a copy to or from host memory failed" in each.message for each in caplog.records) == 1
        assert engine.snapshot().cache.restore_failures == 1
        await engine.set_faults(frozenset())
        prompt = await with_one_in_host(engine)
        assert (await answers(engine, [prompt]))[1][0].source[Tier.HOST] > 0


async def test_the_drill_of_failing_steps_costs_its_requests_and_ends_with_the_fault(running_engine):
    async with running_engine(**HOST) as engine:
        (expected,), _ = await answers(engine, PROMPTS[:1])
        await engine.set_faults(frozenset({Fault.STEP_FAIL}))
        for _ in range(4):
            with pytest.raises(EngineUnavailableError, match="FireDrillError"):
                await collect(engine.submit(request(PROMPTS[0])))
        assert engine.snapshot().loop_restarts_total == 1
        await engine.set_faults(frozenset())
        assert (await answers(engine, PROMPTS[:1]))[0] == [expected]


async def test_the_drill_of_slow_steps_makes_each_wait(running_engine, monkeypatch):
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    async with running_engine(**HOST) as engine:
        await engine.set_faults(frozenset({Fault.SLOW_STEP}))
        await answers(engine, PROMPTS[:1], max_tokens=3)
        assert set(slept) == {SLOW_STEP_SECONDS}
        assert len(slept) >= 3


async def test_the_drill_of_leaked_states_is_healed_by_an_audit(running_engine):
    async with running_engine(**HOST) as engine:
        await with_one_in_host(engine)
        await engine.set_faults(frozenset({Fault.LEAK_HOST_STATE}))
        await evict_from_host(engine)
        assert any("nothing refers to them" in line for line in engine.check())
        report = await engine.audit_cache()
        assert report.reclaimed["host_units"] > 0
        assert engine.snapshot().last_audit is report
        assert engine.check() == []
        assert engine.snapshot().host_state_slots.free == engine.snapshot().host_state_slots.capacity


async def test_without_self_heal_an_audit_only_tells(running_engine):
    async with running_engine(**HOST, self_heal=False) as engine:
        await with_one_in_host(engine)
        await engine.set_faults(frozenset({Fault.LEAK_HOST_STATE}))
        await evict_from_host(engine)
        report = await engine.audit_cache()
        assert (report.reclaimed, report.remaining) == ({}, report.violations)
        assert report.violations
        cache = engine._loop.scheduler.cache
        cache.options = replace(cache.options, self_heal=True)
        assert audit(cache).remaining == ()
