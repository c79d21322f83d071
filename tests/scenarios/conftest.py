"""The engine with the bundled model, on pools that are small enough to overflow."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from engine.catalog import resolve_model
from engine.engine import Engine, EngineOptions
from engine.runner import Runner
from engine.scheduler import Scheduler
from tests.scenarios.talking import Talk
from tests.waiting import PATIENCE_SECONDS

SMALL = {
    "max_concurrency": 2,
    "device_state_slots": 2,
    "max_pending_requests": 64,
    "max_context": 1024,
    "kv_pages": 256,
    "page_size": 16,
    "prefill_chunk": 64,
    "host_cache_mib": 8,
}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Steps this small are quicker in one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def demo_folder() -> Path:
    return resolve_model("demo")


@pytest.fixture
def talking(demo_folder, monkeypatch):
    """A context manager: a Talk with an engine that runs; when it is left, the books agree and nothing is held.

    No token ends an answer, so that what the model has learnt does not matter.
    """
    monkeypatch.setattr(
        "engine.engine.Scheduler", lambda limits, cache, _ends, transfers: Scheduler(limits, cache, (), transfers)
    )

    @contextlib.asynccontextmanager
    async def start(folder: Path = demo_folder, **options):
        engine = await asyncio.to_thread(Engine.load, folder, EngineOptions(**{**SMALL, **options}))
        # On a busy machine a copy this small may take longer than to compute, and then it is not made.
        engine._loop.scheduler.cache.costs.saw_restore(10**18, 1.0, time.monotonic())
        await engine.start()
        talk = Talk(engine)
        try:
            yield talk
            assert await engine.drain()
            assert engine.check() == []
            assert talk.held() == [0, 0, 0, 0]
        finally:
            await engine.stop()

    return start


class StepGate:
    """Lets a test act while a step runs: `before` is called in the engine thread, with each plan that computes
    something, and `copying` with each that only copies."""

    def __init__(self) -> None:
        self.before: Callable[..., None] = lambda runner, plan: None
        self.after: Callable[..., None] = lambda runner, plan: None
        self.copying: Callable[..., None] = lambda runner, plan: None


@pytest.fixture
def steps(monkeypatch) -> StepGate:
    gate = StepGate()
    run = Runner.run

    def gated(self, plan):
        if not plan.segments:
            gate.copying(self, plan)
            return run(self, plan)
        gate.before(self, plan)
        result = run(self, plan)
        gate.after(self, plan)
        return result

    monkeypatch.setattr(Runner, "run", gated)
    return gate


@pytest.fixture
def stand_still(steps):
    """`stand_still(n)`: the n-th step from now waits in the engine thread; returns events (reached, go)."""

    def at(step: int) -> tuple[threading.Event, threading.Event]:
        reached, go = threading.Event(), threading.Event()
        count = iter(range(step, -(10**6), -1))

        def before(_runner, _plan):
            if next(count) == 0:
                reached.set()
                assert go.wait(timeout=PATIENCE_SECONDS)

        steps.before = before
        return reached, go

    return at
