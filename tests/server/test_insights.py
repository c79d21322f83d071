"""Insights over HTTP: what holds, as it is asked for and as it changes, and who may look."""

import asyncio
import json

import pytest
from pydantic import SecretStr

from cache import Fault, ReuseReport
from engine.events import ReuseDecided
from server.app import create_app
from server.settings import OpsSettings
from server.version import package_version
from tests.server.conftest import client_of
from tests.waiting import PATIENCE_SECONDS, let_it_work

pytestmark = pytest.mark.anyio

LOST = ReuseReport("root", 1000, 0, 900, {"device": 0, "host": 0, "disk": 0}, {"publish_skipped": 900}, None, 900, 900)


@pytest.fixture
async def app(settings, monkeypatch):
    monkeypatch.setattr("server.daemon._TICK_SECONDS", 0.01)
    app = create_app(settings)
    await app.state.daemon.start()
    yield app
    await app.state.daemon.stop()


def lose_reuse(app, count=8):
    """As if so many prompts that could have been reused were computed."""
    for number in range(count):
        app.state.daemon.operations.engine_event(ReuseDecided(f"lost-{number}", "", LOST))


async def until_changed(app, seen):
    async with asyncio.timeout(PATIENCE_SECONDS):
        return await app.state.daemon.operations.changes.wait(seen)


async def test_a_daemon_that_is_well_has_none(app):
    async with client_of(app) as client:
        found = (await client.get("/insights")).json()
    assert (found["status"], found["reuse"], found["insights"]) == ("ok", "healthy", [])
    assert found["generated_unix_ms"] > 1_700_000_000_000


async def test_a_collapse_shows_on_every_door_and_a_restart_is_not_asked_for(app):
    seen = app.state.daemon.operations.changes.count
    async with client_of(app) as client:
        assert (await client.get("/readyz?strict=reuse")).status_code == 200
        lose_reuse(app)
        await until_changed(app, seen)
        found = (await client.get("/insights")).json()
        health = await client.get("/health")
        assert (health.status_code, health.json()["status"]) == (200, "degraded")
        assert health.json()["reuse"] in ("degraded", "collapsed")
        assert health.json()["reasons"]
        assert (await client.get("/readyz")).status_code == 200
        assert (await client.get("/readyz?strict=reuse")).status_code == 503
        assert (await client.get("/livez")).status_code == 200
        metrics = (await client.get("/metrics")).text
    assert "dalsegno_reuse_degraded 1.0" in metrics
    insight = next(each for each in found["insights"] if each["id"].startswith("prefix."))
    assert set(insight) == {
        "id",
        "severity",
        "title",
        "statement",
        "evidence",
        "measured_over",
        "since_unix_ms",
        "recommendation",
    }
    assert insight["statement"]
    assert insight["recommendation"]


async def test_an_unknown_kind_of_strictness_is_refused(app):
    async with client_of(app) as client:
        refused = await client.get("/readyz?strict=everything")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "strict")


async def test_a_stream_tells_at_once_and_at_each_change_and_ends_with_the_daemon(app):
    daemon = app.state.daemon
    received: asyncio.Queue[dict] = asyncio.Queue()

    async def send(message):
        for line in message.get("body", b"").decode().splitlines():
            if line.startswith("data: "):
                received.put_nowait(json.loads(line[6:]))

    async def receive():
        await asyncio.Event().wait()

    scope = {
        "type": "http",
        "method": "GET",
        "path": "/insights/stream",
        "query_string": b"",
        "headers": [],
        "client": ("127.0.0.1", 1),
    }
    reading = asyncio.create_task(app(scope, receive, send))
    async with asyncio.timeout(PATIENCE_SECONDS):
        first = await received.get()
        assert (first["status"], first["insights"]) == ("ok", [])
        lose_reuse(app)
        while not (told := await received.get())["insights"]:
            pass
        assert told["status"] == "degraded"
        await daemon.stop()
        await reading
    assert received.get_nowait()["status"] == "draining"


@pytest.fixture
async def guarded(settings):
    keys = {"api_keys": (SecretStr("client-key"),), "admin_key": SecretStr("admin-key")}
    return create_app(settings.model_copy(update={"server": settings.server.model_copy(update=keys)}))


@pytest.mark.parametrize("path", ["/insights", "/metrics"])
@pytest.mark.parametrize(("key", "status"), [(None, 401), ("wrong", 401), ("client-key", 200), ("admin-key", 200)])
async def test_both_clients_and_operators_may_look_where_keys_are_set(guarded, path, key, status):
    async with client_of(guarded) as client:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        assert (await client.get(path, headers=headers)).status_code == status


async def test_the_operators_key_does_not_open_what_is_for_clients(guarded):
    async with client_of(guarded) as client:
        refused = await client.get("/v1/models", headers={"x-api-key": "admin-key"})
        assert refused.status_code == 401
        assert (await client.get("/")).status_code == 200, "the page holds no data"


async def test_history_grows_by_a_sample_each_interval(settings, monkeypatch):
    monkeypatch.setattr("server.daemon._TICK_SECONDS", 0.01)
    app = create_app(settings.model_copy(update={"ops": OpsSettings(throughput_interval_s=0.05)}))
    await app.state.daemon.start()
    async with client_of(app) as client, asyncio.timeout(PATIENCE_SECONDS):
        points = []
        while len(points) < 2:
            await let_it_work()
            points = (await client.get("/admin/history")).json()["points"]
        last = points[-1]["timestamp_unix_ms"]
        later = (await client.get(f"/admin/history?since={last}")).json()
        refused = await client.get("/admin/history?since=-1")
    await app.state.daemon.stop()
    assert all(point["timestamp_unix_ms"] > last for point in later["points"])
    assert later["interval_seconds"] == 0.05
    assert points[0]["context_cache"]["capacity"]["kv_pages"] > 0
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "since")


async def test_what_is_served_is_told_once_there_is_an_engine(settings):
    app = create_app(settings)
    async with client_of(app) as client:
        early = await client.get("/admin/server")
        engine = await app.state.daemon.start()
        told = (await client.get("/admin/server")).json()
        await app.state.daemon.stop()
    assert (early.status_code, early.json()["error"]["code"]) == (503, "engine_unavailable")
    assert told.pop("uptime_seconds") > 0
    assert told == {
        "version": package_version(),
        "model": app.state.daemon.model_id,
        "architecture": engine.config.architecture,
        "backend": engine.backend_name,
        "max_context_tokens": engine.max_context_tokens,
        "max_concurrency": engine.options.max_concurrency,
    }


async def test_draining_lets_the_running_finish_and_takes_no_more(app):
    chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 200, "ignore_eos": True}
    async with client_of(app) as client, asyncio.timeout(PATIENCE_SECONDS):
        running = asyncio.create_task(client.post("/v1/chat/completions", json=chat))
        while not (await client.get("/admin/cache")).json()["requests_running"]:
            await let_it_work()
        drained = (await client.post("/admin/drain")).json()
        health, refused = await client.get("/health"), await client.post("/v1/chat/completions", json=chat)
        assert (await running).status_code == 200
    assert drained == {"requests_running": 1, "requests_waiting": 0}
    assert (health.status_code, health.json()["status"]) == (503, "draining")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_unavailable")


async def test_an_event_log_has_what_happened_and_nothing_of_what_was_said(settings, tmp_path):
    path = tmp_path / "events.jsonl"
    app = create_app(settings.model_copy(update={"ops": OpsSettings(event_log=str(path))}))
    await app.state.daemon.start()
    async with client_of(app) as client:
        chat = {"messages": [{"role": "user", "content": "marker-of-a-prompt"}], "max_tokens": 3}
        await client.post("/v1/chat/completions", json=chat, headers={"x-request-id": "mine"})
        await client.post("/v1/chat/completions", json={"messages": 3})
    await app.state.daemon.stop()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["event"] for line in lines if line["event"] != "audit"] == [
        "server_start",
        "request_start",
        "request_done",
        "request_rejected",
        "server_stop",
    ]
    assert {line["request_id"] for line in lines if line["event"] in ("request_start", "request_done")} == {"mine"}
    rejected = next(line for line in lines if line["event"] == "request_rejected")
    assert (rejected["status"], rejected["code"], rejected["endpoint"]) == (
        400,
        "invalid_value",
        "/v1/chat/completions",
    )
    assert "marker-of-a-prompt" not in path.read_text()


async def test_what_came_about_since_the_last_look_is_told_before_the_end(settings, tmp_path, monkeypatch):
    monkeypatch.setattr("server.daemon._TICK_SECONDS", 1e6)
    path = tmp_path / "events.jsonl"
    app = create_app(settings.model_copy(update={"ops": OpsSettings(event_log=str(path))}))
    daemon = app.state.daemon
    await daemon.start()
    engine = daemon.engine
    await engine.set_faults(frozenset({Fault.REFUSE_PUBLISH}))
    daemon.operations.tick(engine.snapshot(), daemon.health())
    await engine.set_faults(frozenset())
    await daemon.stop()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    told = [(line["event"], line["insight"]["id"]) for line in lines if line["event"].startswith("insight")]
    assert told == [("insight_opened", "engine.fire_drill"), ("insight_cleared", "engine.fire_drill")]
