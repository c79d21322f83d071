"""Faults on purpose and resets: what is lost comes back, one request pays for one fault, a reset cures: S25, S27."""

import asyncio
import threading
from dataclasses import replace

import pytest

from cache import Fault, Tier
from engine.loop import EngineLoop
from tests.waiting import PATIENCE_SECONDS, let_it_work

pytestmark = pytest.mark.anyio

HOST = {"host_cache_mib": 16, "device_state_slots": 2}


def prompt(number: int) -> tuple[int, ...]:
    return tuple(300 + (number * 7 + place * (number + 3)) % 900 for place in range(40))


async def overflow(talk, first: int, count: int = 12) -> None:
    """Prompts that nobody sends again, more than all tiers hold."""
    for number in range(first, first + count):
        await talk.ask(prompt(number))


@pytest.fixture
def without_timer(monkeypatch):
    """No audit but those that a test asks for."""
    monkeypatch.setattr("engine.audit.Auditor.audit_if_due", lambda *_args, **_kwargs: None)


@pytest.mark.usefixtures("without_timer")
async def test_s27_what_host_memory_has_leaked_comes_back_and_is_counted(talking):
    async with talking(**HOST) as talk:
        await overflow(talk, 0)
        await talk.engine.set_faults(frozenset({Fault.LEAK_HOST_STATE}))
        await overflow(talk, 100)
        await talk.engine.set_faults(frozenset())
        found = await talk.engine.audit_cache()
        assert found.violations
        assert found.reclaimed["host_units"] > 0
        assert found.remaining == ()
        assert talk.engine.check() == []
        assert talk.engine.snapshot().cache.orphans_reclaimed["host_units"] == found.reclaimed["host_units"]


@pytest.mark.usefixtures("without_timer")
async def test_s27_without_self_heal_an_audit_only_tells_and_a_reset_cures(talking):
    async with talking(**HOST, self_heal=False) as talk:
        await talk.engine.set_faults(frozenset({Fault.LEAK_HOST_STATE}))
        await overflow(talk, 0, 24)
        await talk.engine.set_faults(frozenset())
        found = await talk.engine.audit_cache()
        assert found.violations == found.remaining != ()
        assert found.reclaimed == {}
        await talk.engine.reset_cache([Tier.DEVICE, Tier.HOST])
        assert talk.engine.check() == []
        host = talk.engine.snapshot().host_units
        assert host.free == host.capacity
        first, again = [await talk.ask(prompt(500)) for _ in range(2)]
        assert (first.reuse.cached_tokens, again.reuse.cached_tokens) == (0, len(prompt(500)) - 1)


async def test_s27_a_daemon_that_works_audits_itself(talking, monkeypatch):
    monkeypatch.setattr("engine.audit.IDLE_SECONDS", 0.0)
    monkeypatch.setattr("engine.loop._IDLE_TURN_SECONDS", 0.01)
    async with talking(**HOST) as talk:
        await talk.engine.set_faults(frozenset({Fault.LEAK_HOST_STATE}))
        await overflow(talk, 0)
        await talk.engine.set_faults(frozenset())
        await talk.ask(prompt(900))
        await until_audited(talk.engine._loop)
        assert talk.engine.snapshot().cache.orphans_reclaimed["host_units"] > 0


async def until_audited(loop: EngineLoop) -> None:
    audits = loop.scheduler.cache.stats.audits
    while loop.scheduler.cache.stats.audits == audits:
        await loop.between_steps(lambda _scheduler: None)


async def test_s25_a_restore_that_fails_costs_its_reuse_and_nothing_else(talking):
    async with talking(**HOST) as talk:
        cold = await talk.ask(prompt(0), max_tokens=4)
        await overflow(talk, 1, 4)
        others = talk.engine.snapshot().cache.checkpoints_dropped
        await talk.engine.set_faults(frozenset({Fault.RESTORE_FAIL}))
        failed = await talk.ask(prompt(0), max_tokens=4)
        await talk.engine.set_faults(frozenset())
        assert failed.token_ids == cold.token_ids
        assert failed.reuse.cached_tokens == 0
        assert set(failed.reuse.lost) == {"restore_failed"}
        snapshot = talk.engine.snapshot()
        assert snapshot.cache.restore_failures == 1
        assert snapshot.cache.checkpoints_dropped <= others + 2
        assert talk.held() == [0, 0, 0, 0]
        assert talk.engine.check() == []
        again = await talk.ask(prompt(0), max_tokens=4)
        assert (again.token_ids, again.reuse.cached_tokens) == (cold.token_ids, len(prompt(0)) - 1)


async def test_a_reset_leaves_what_a_request_is_being_resumed_from(talking, steps):
    async with talking(**HOST, max_context=64, kv_pages=4, max_concurrency=1) as talk:
        cold = await talk.ask(prompt(0), max_tokens=4)
        await overflow(talk, 1, 5)
        scheduler = talk.engine._loop.scheduler
        scheduler.limits = replace(scheduler.limits, copy_bytes=1, copy_bytes_alone=1)
        copying, go_on = threading.Event(), threading.Event()

        def wait(_runner, _plan):
            copying.set()
            assert go_on.wait(timeout=PATIENCE_SECONDS)

        steps.copying = wait
        resumed = asyncio.create_task(talk.ask(prompt(0), max_tokens=4))
        assert await asyncio.to_thread(copying.wait, PATIENCE_SECONDS)
        assert talk.engine.snapshot().restoring == 1
        reset = asyncio.create_task(talk.engine.reset_cache([Tier.HOST]))
        await let_it_work()
        go_on.set()
        left = await reset
        assert left[Tier.HOST].pinned_checkpoints == 1
        answer = await resumed
        assert (answer.token_ids, answer.reuse.source["host"]) == (cold.token_ids, len(prompt(0)) - 1)
        await talk.engine._loop.wait_until_empty()
        gone = await talk.engine.reset_cache([Tier.DEVICE, Tier.HOST])
        assert [counts.pinned_checkpoints for counts in gone.values()] == [0, 0]
        host = talk.engine.snapshot().host_units
        assert host.free == host.capacity
