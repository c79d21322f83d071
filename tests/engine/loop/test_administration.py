"""What an operator asks of a running engine is done between two steps, and never left unanswered."""

import asyncio

import pytest

from cache import Tier
from engine.errors import EngineUnavailableError
from tests.engine.loop.test_engine import PROMPTS, collect, gate, request  # noqa: F401  (gate is a fixture)

pytestmark = pytest.mark.anyio


async def test_a_reset_forgets_what_was_remembered_and_says_how_much(running_engine):
    async with running_engine() as engine:
        await collect(engine.submit(request(PROMPTS[6])))
        before = engine.snapshot()
        dropped = (await engine.reset_cache([Tier.DEVICE]))[Tier.DEVICE]
        assert dropped.checkpoints >= 1
        cached = {"device_kv_pages": before.kv_pages.cached, "device_state_slots": before.state_slots.cached}
        assert dropped.units == cached
        assert dropped.pinned_checkpoints == 0
        assert engine.snapshot().kv_pages.free == before.kv_pages.capacity


async def test_a_reset_of_another_tier_leaves_the_device_alone(running_engine):
    async with running_engine() as engine:
        await collect(engine.submit(request(PROMPTS[6])))
        before = engine.snapshot().kv_pages
        await engine.reset_cache([Tier.DISK])
        assert engine.snapshot().kv_pages == before


async def test_a_reset_while_a_request_runs_changes_no_token(running_engine):
    async with running_engine() as engine:
        _, expected = await collect(engine.submit(request(PROMPTS[6], max_tokens=40)))
        generation = engine.submit(request(PROMPTS[6], max_tokens=40))
        first = await anext(generation)
        await engine.reset_cache(list(Tier))
        _, rest = await collect(generation)
        assert [*first.token_ids, *rest] == expected


async def test_work_waits_until_the_step_is_over(running_engine, gate):  # noqa: F811
    async with running_engine() as engine:
        gate.clear()
        generation = engine.submit(request(PROMPTS[1]))
        while not engine.snapshot().running:
            await asyncio.sleep(0)
        audit = asyncio.create_task(engine.audit_cache())
        for _ in range(5):
            await asyncio.sleep(0)
        assert not audit.done()
        gate.set()
        assert (await audit).violations == ()
        await collect(generation)


async def test_an_audit_tells_each_violation(running_engine):
    async with running_engine(self_heal=False) as engine:
        await collect(engine.submit(request(PROMPTS[6])))
        pool = engine._loop.scheduler.cache.pages
        lost = pool._free.pop()
        assert any(f"unit {lost} is lost" in line for line in (await engine.audit_cache()).violations)
        pool._free.append(lost)


async def test_what_a_prefill_costs_is_measured(running_engine):
    async with running_engine() as engine:
        assert engine.snapshot().prefill_tokens_per_second is None
        await collect(engine.submit(request(PROMPTS[6])))
        assert engine.snapshot().prefill_tokens_per_second > 0


async def test_work_that_fails_fails_its_caller_only(running_engine):
    async with running_engine() as engine:

        def fail(_scheduler):
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await engine._loop.between_steps(fail)
        assert (await engine.audit_cache()).violations == ()


async def test_work_that_a_stopping_engine_cannot_do_any_more_is_refused(running_engine, gate):  # noqa: F811
    async with running_engine() as engine:
        gate.clear()
        generation = engine.submit(request(PROMPTS[1], max_tokens=200))
        while not engine.snapshot().running:
            await asyncio.sleep(0)
        audit = asyncio.create_task(engine.audit_cache())
        await asyncio.sleep(0)
        stopping = asyncio.create_task(engine.stop())
        await asyncio.sleep(0)
        gate.set()
        await stopping
        for call in (audit, engine.audit_cache()):
            with pytest.raises(EngineUnavailableError):
                await call
        with pytest.raises(EngineUnavailableError):
            await collect(generation)
