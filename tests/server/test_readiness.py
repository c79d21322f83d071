"""A daemon whose steps fail is not ready until one works, also when nobody asks it any more."""

import asyncio
import math

import pytest

from cache import Fault
from server.app import create_app
from tests.server.conftest import client_of
from tests.server.test_door import CHAT, HELLO, events
from tests.waiting import PATIENCE_SECONDS, let_it_work

pytestmark = pytest.mark.anyio


@pytest.fixture
async def app(settings, monkeypatch):
    """Its steps can be made to fail; it looks after itself all the time."""
    monkeypatch.setattr("server.daemon._TICK_SECONDS", 0.01)
    app = create_app(settings)
    await app.state.daemon.start()
    yield app
    await app.state.daemon.stop()


async def test_it_is_not_ready_after_three_failures_and_ready_when_a_step_works(app, monkeypatch):
    monkeypatch.setattr(app.state.daemon, "_tries_next_at", math.inf)
    engine = app.state.daemon.engine
    await engine.set_faults(frozenset({Fault.STEP_FAIL}))
    async with client_of(app) as client:
        for ready in (200, 200, 503):
            failed = await client.post(CHAT, json=HELLO)
            assert (failed.status_code, failed.json()["error"]["code"]) == (503, "engine_unavailable")
            assert (await client.get("/readyz")).status_code == ready
        health = await client.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "unavailable")
        assert "3 steps of the engine failed" in health.json()["reasons"][0]
        assert (await client.get("/livez")).status_code == 200
        await engine.set_faults(frozenset())
        assert (await client.post(CHAT, json=HELLO)).status_code == 200
        assert (await client.get("/readyz")).status_code == 200


async def test_it_finds_out_by_itself_that_steps_work_again(app, monkeypatch):
    monkeypatch.setattr("server.daemon._TRIAL_SECONDS", 0.01)
    engine = app.state.daemon.engine
    await engine.set_faults(frozenset({Fault.STEP_FAIL}))
    async with client_of(app) as client, asyncio.timeout(PATIENCE_SECONDS):
        for _ in range(3):
            await client.post(CHAT, json=HELLO)
        tried = engine.snapshot().step_failures_total
        while engine.snapshot().step_failures_total < tried + 2:
            await let_it_work()
        assert (await client.get("/readyz")).status_code == 503
        await engine.set_faults(frozenset())
        while (await client.get("/readyz")).status_code != 200:
            await let_it_work()
        requests = (await client.get("/admin/requests")).json()["requests"]
    assert [each["endpoint"] for each in requests] == [CHAT] * 3, "its own are nobody's requests"


@pytest.mark.parametrize("streams", [False, True])
async def test_a_client_is_told_the_type_of_an_inner_error_and_not_its_text(app, monkeypatch, streams):
    def fail(*_arguments):
        raise RuntimeError("/opt/driver: secret 17")

    monkeypatch.setattr("engine.runner.Runner._queue", fail)
    async with client_of(app) as client:
        answer = await client.post(CHAT, json=HELLO | {"stream": streams})
        error = events(answer.text)[-1]["error"] if streams else answer.json()["error"]
        told = await client.get("/admin/requests")
    assert error["code"] == "engine_unavailable"
    assert "(RuntimeError)" in error["message"]
    assert "secret" not in answer.text + told.text
