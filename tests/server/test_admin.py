"""`/admin`: who is let in, what is answered, and what it never tells."""

import asyncio
import re

import pytest
import torch
from pydantic import SecretStr

from cache import Fault, Tier
from engine.administration import TierReset
from engine.kernels.torch.linear import can_pack
from server.app import create_app
from server.drill import FireDrill
from server.settings import ServerSettings, Settings
from tests.server.conftest import client_of
from tests.server.test_door import CHAT, HELLO, HELLO_TOKENS, HELLO_TURN_TOKENS, fresh
from tests.waiting import PATIENCE_SECONDS, let_it_work

pytestmark = pytest.mark.anyio

CACHE = "/admin/cache"
RESET = "/admin/cache/reset"


def locked(**keys):
    """A daemon without a model: who is let in gets 503."""
    return create_app(Settings(server=ServerSettings(**keys)))


@pytest.mark.parametrize(
    ("client", "status"),
    [
        ("127.0.0.1", 503),
        ("127.8.8.8", 503),
        ("::1", 503),
        ("::ffff:127.0.0.1", 503),
        ("10.0.0.1", 403),
        ("::ffff:10.0.0.1", 403),
        ("fe80::1", 403),
        ("testclient", 403),
        (None, 403),
    ],
)
async def test_without_an_admin_key_only_this_machine_is_let_in(client, status):
    app = locked(api_keys=(SecretStr("client"),))
    peer = None if client is None else (client, 1234)
    async with client_of(app, client=peer) as http:
        response = await http.get(CACHE, headers={"x-api-key": "client"})
    assert response.status_code == status
    if status == 403:
        assert response.json()["error"]["type"] == "permission_error"
        assert "--admin-key" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("headers", "is_let_in"),
    [
        ({"authorization": "Bearer operator"}, True),
        ({"x-api-key": "operator"}, True),
        ({"authorization": "Bearer client"}, False),
        ({"x-api-key": "operato"}, False),
        ({}, False),
    ],
)
async def test_with_an_admin_key_nothing_else_opens(headers, is_let_in):
    app = locked(api_keys=(SecretStr("client"),), admin_key=SecretStr("operator"))
    async with client_of(app, client=("10.0.0.1", 1234)) as http:
        assert (await http.get(CACHE, headers=headers)).status_code == (503 if is_let_in else 401)


async def test_the_admin_key_is_no_key_for_clients():
    app = locked(api_keys=(SecretStr("client"),), admin_key=SecretStr("operator"))
    async with client_of(app) as http:
        assert (await http.get("/v1/models", headers={"x-api-key": "operator"})).status_code == 401


async def test_the_cache_is_shown_with_units_that_add_up(client):
    await client.post(CHAT, json=fresh())
    shown = (await client.get(CACHE)).json()
    assert shown["pools"].keys() == {"device_kv_pages", "device_state_slots", "host_units", "host_state_slots"}
    for units in shown["pools"].values():
        assert units["free"] + units["cached"] + units["pinned"] + units["in_flight"] == units["capacity"]
    assert shown["pools"]["device_kv_pages"]["cached"] > 0
    assert shown["requests_running"] == 0
    assert shown["selections"]["root"] > 0


async def test_every_kernel_is_shown_with_what_serves_it(client):
    first, *linear = (await client.get(CACHE)).json()["kernels"]
    assert first == {"kernel": "all", "implementation": "torch", "reason": ""}
    assert all(re.fullmatch(r"linear \(\d+ x \d+ in float32\)", each["kernel"]) for each in linear)
    assert all("of the time of torch's own for 1 row" in each["implementation"] for each in linear)
    assert bool(linear) == can_pack(torch.float32, torch.device("cpu"))


async def test_a_reset_makes_the_next_request_cold_and_the_one_after_it_hit(client):
    body = fresh()
    await client.post(CHAT, json=body)
    answer = await client.post(RESET, json={"tiers": ["device", "host", "disk"]})
    assert answer.status_code == 200
    tiers = answer.json()["tiers"]
    assert tiers.keys() == {"device", "host", "disk"}
    assert tiers["device"]["checkpoints"] > 0
    assert (await client.get(CACHE)).json()["pools"]["device_kv_pages"]["cached"] == 0
    for cached in (0, HELLO_TURN_TOKENS):
        assert (await client.post(CHAT, json=body)).json()["reuse"]["cached_tokens"] == cached


async def test_a_reset_that_had_to_leave_something_says_what(client, monkeypatch):
    async def reset(_engine, tiers):
        return {Tier.DEVICE: TierReset(1, {}, pinned_checkpoints=4)}

    monkeypatch.setattr("engine.engine.Engine.reset_cache", reset)
    response = await client.post(RESET, json={"tiers": ["device"]})
    assert response.status_code == 409
    assert response.json()["error"]["code"] == "cache_in_use"
    assert response.json()["tiers"]["device"]["pinned_checkpoints"] == 4


@pytest.mark.parametrize(
    ("path", "body", "param", "said"),
    [
        (RESET, {"tiers": ["device", "tape"]}, "tiers[1]", "'tape'; expected one of device, host, disk"),
        (RESET, {"tiers": []}, "tiers", "at least 1"),
        (RESET, {"tiers": "device"}, "tiers", "list"),
        (RESET, {}, "tiers", "required"),
        ("/admin/faults", {"faults": ["fire"]}, "faults[0]", "'fire'; expected one of leak_host_state"),
        ("/admin/faults", {}, "faults", "required"),
    ],
)
async def test_a_wrong_wish_is_refused_by_name(drilled, path, body, param, said):
    response = await drilled.post(path, json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert said in error["message"]


async def test_an_audit_of_a_sound_cache_finds_nothing(client):
    await client.post(CHAT, json=fresh())
    assert (await client.post("/admin/cache/audit")).json() == {"violations": [], "reclaimed": {}, "remaining": []}


async def test_a_request_is_found_by_its_id_and_by_its_answers_and_tells_its_reuse(client):
    body = fresh()
    await client.post(CHAT, json=body)
    answer = await client.post(CHAT, json=body, headers={"x-request-id": "mine"})
    found = (await client.get("/admin/requests/mine")).json()
    assert (await client.get(f"/admin/requests/{answer.json()['id']}")).json() == found
    assert (found["request_id"], found["endpoint"], found["outcome"]) == ("mine", CHAT, "ok")
    [told] = found["answers"]
    assert told["finish_reason"] == "length"
    assert told["result"] == {
        "prompt_tokens": HELLO_TOKENS,
        "completion_tokens": 6,
        "cached_tokens": HELLO_TURN_TOKENS,
        "computed_prefill_tokens": HELLO_TOKENS - HELLO_TURN_TOKENS,
        "achievable_tokens": HELLO_TURN_TOKENS,
        "expected_tokens": HELLO_TURN_TOKENS,
        "reuse": "private_turn_closure",
        "source": {"device": HELLO_TURN_TOKENS, "host": 0, "disk": 0},
        "lost": {},
        "diverged_at": None,
        "preemptions": 0,
        "recomputed_tokens": 0,
    }
    times = told["timings_seconds"]
    assert times["total"] >= times["ttft"] >= times["queue"] >= 0
    parts = {"queue", "restore", "stalled", "prefill", "preempted", "decode"}
    assert sum(times[each] for each in parts) == pytest.approx(times["total"])


async def test_an_unknown_request_is_not_found(client):
    response = await client.get("/admin/requests/nobody")
    assert response.status_code == 404
    assert "1,000" in response.json()["error"]["message"]


async def test_a_request_tells_nothing_of_what_was_said(client):
    secret = "the secret is 17"
    body = {"messages": [{"role": "user", "content": secret}], "temperature": 0, "max_tokens": 9}
    answer = await client.post(CHAT, json=body, headers={"x-request-id": "discreet", "x-api-key": "sk-secret"})
    told = (await client.get("/admin/requests/discreet")).text
    for word in (secret, "secret", answer.json()["choices"][0]["message"]["content"]):
        assert word not in told


async def test_a_request_that_runs_or_was_left_says_so(client):
    body = HELLO | {"max_tokens": 400, "stream": True, "ignore_eos": True}
    async with asyncio.timeout(PATIENCE_SECONDS):
        asking = asyncio.create_task(client.post(CHAT, json=body, headers={"x-request-id": "left"}))
        while (await client.get("/admin/requests/left")).status_code == 404:
            await let_it_work()
        running = (await client.get("/admin/requests/left")).json()
        asking.cancel()
        left = running
        while left["outcome"] is None or left["answers"][0]["finish_reason"] is None:
            await let_it_work()
            left = (await client.get("/admin/requests/left")).json()
    assert [(each["outcome"], each["answers"][0]["finish_reason"]) for each in (running, left)] == [
        (None, None),
        ("cancelled", "cancelled"),
    ]
    assert running["answers"][0]["result"] is None
    assert left["answers"][0]["result"]["prompt_tokens"] == HELLO_TOKENS
    assert "Its client left before the end." in left["answers"][0]["explanation"]


async def test_faults_need_a_daemon_that_was_started_for_a_drill(client):
    response = await client.post("/admin/faults", json={"faults": ["slow_step"]})
    assert response.status_code == 403
    assert "--allow-faults" in response.json()["error"]["message"]
    assert (await client.get("/admin/faults")).json() == {"faults": []}


@pytest.fixture(scope="module")
async def drilled(settings, anyio_backend):
    app = create_app(settings, FireDrill(True, frozenset({Fault.REFUSE_PUBLISH})))
    await app.state.daemon.start()
    async with client_of(app) as client:
        yield client
    await app.state.daemon.stop()


async def test_faults_are_set_at_the_start_and_replaced_later(drilled):
    assert (await drilled.get("/admin/faults")).json() == {"faults": ["refuse_publish"]}
    for faults in (["leak_host_state", "restore_fail"], []):
        assert (await drilled.post("/admin/faults", json={"faults": faults})).json() == {"faults": faults}
        assert (await drilled.get("/admin/faults")).json() == {"faults": faults}
    assert (await drilled.get(CACHE)).json()["faults"] == []
