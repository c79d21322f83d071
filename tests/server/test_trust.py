"""Who is believed without a key: programs, not foreign pages; for /admin those on this machine, not a proxy."""

import re

import httpx
import pytest
from pydantic import SecretStr

from server.app import create_app
from server.settings import ServerSettings, Settings
from tests.server.conftest import client_of
from tests.server.test_door import CHAT, HELLO

pytestmark = pytest.mark.anyio

PROBES = {"/health", "/livez", "/readyz", "/ping", "/version"}

OPEN = ("/livez", "/", "/docs", "/openapi.json", "/dashboard/main.js")


def asking(app, address="127.0.0.1", client=("127.0.0.1", 123)):
    """A client whose connection ends at that address of the daemon."""
    transport = httpx.ASGITransport(app, client=client)
    return httpx.AsyncClient(transport=transport, base_url=f"http://{f'[{address}]' if ':' in address else address}")


def unloaded(**server):
    """A daemon without a model: who is let in gets 503, or something else that is no 403."""
    return create_app(Settings(server=ServerSettings(**server)))


def doors(app):
    """All that changes or tells something, by method and path."""
    paths = app.openapi()["paths"]
    assert paths.keys() >= {"/admin/drain", "/admin/requests/{name}", "/metrics", "/insights", "/v1/models", CHAT}
    return [
        (method, re.sub(r"\{\w+\}", "some", path))
        for path, methods in paths.items()
        if path not in PROBES
        for method in methods
    ]


@pytest.mark.parametrize("named", ["https://app.example", "*"])
async def test_a_page_that_was_named_may_call_the_model_and_never_operate_the_daemon(named):
    app = unloaded(cors_origins=(named,))
    page = {"origin": "https://app.example", "sec-fetch-site": "cross-site"}
    async with asking(app) as client:
        for method, path in doors(app):
            if path == "/insights/stream":  # it would go on for ever
                continue
            answer = await client.request(method, path, headers=page)
            is_refused = answer.status_code == 403 and answer.json()["error"]["code"] == "foreign_page"
            assert is_refused is path.startswith("/admin/"), path


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example"},
        {"origin": "https://evil.example"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
    ids=str,
)
async def test_a_foreign_page_finds_every_door_shut_where_no_key_is_asked_for(headers):
    app = unloaded()
    async with asking(app) as client:
        for method, path in doors(app):
            refused = await client.request(method, path, headers=headers)
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "foreign_page"), path
            assert "evil" not in refused.text
        for path in OPEN:
            assert (await client.get(path, headers=headers)).status_code == 200, path


@pytest.mark.parametrize("path", ["/v1/models", "/admin/cache"])
async def test_a_key_is_enough_from_any_page_and_under_any_name(path):
    app = unloaded(api_keys=(SecretStr("client"),), admin_key=SecretStr("operator"))
    foreign = {"host": "llm.example", "origin": "https://chat.example", "sec-fetch-site": "cross-site"}
    for key in ("client", "operator"):
        async with asking(app, client=("10.0.0.1", 1)) as client:
            status = (await client.get(path, headers=foreign | {"x-api-key": key})).status_code
            assert status == (503 if (key == "operator") is path.startswith("/admin") else 401)


@pytest.mark.parametrize(
    ("address", "host", "is_ours"),
    [
        ("127.0.0.1", "localhost", True),
        ("127.0.0.1", "LocalHost:8000", True),
        ("127.0.0.1", "localhost.:8000", True),
        ("127.0.0.1", "dalsegno.localhost:8000", True),
        ("127.0.0.1", "127.0.0.1:8000", True),
        ("::1", "[::1]:8000", True),
        ("::1", "::1", True),
        ("127.0.0.1", "0.0.0.0:8000", True),
        ("127.0.0.1", "box", True),
        ("127.0.0.1", "", True),
        ("127.0.0.1", "evil.example:8000", False),
        ("127.0.0.1", "localhost.evil.example", False),
        ("127.0.0.1", "evillocalhost", False),
        ("127.0.0.1", "127.0.0.1.evil.example", False),
        ("127.0.0.1", "192.168.1.5", False),
        ("127.0.0.1", "evil.local", False),
        ("127.0.0.1", "evil", False),
        ("::1", "[evil]", False),
        ("192.168.1.5", "192.168.1.5:8000", True),
        ("172.17.0.2", "192.168.1.5:8000", True),
        ("172.17.0.2", "dalsegno:8000", True),
        ("10.0.0.9", "llm.models.svc.cluster.local", True),
        ("10.0.0.9", "box.home.arpa", True),
        ("fd00::5", "[fd00::5]:8000", True),
        ("10.0.0.9", "evil.example", False),
        ("10.0.0.9", "local.evil.example", False),
        ("10.0.0.9", "192.168.1.5.evil.example", False),
    ],
)
async def test_names_that_a_page_can_make_its_own_are_foreign(monkeypatch, address, host, is_ours):
    monkeypatch.setattr("socket.gethostname", lambda: "box")
    async with asking(unloaded(), address) as client:
        assert (await client.get("/v1/models", headers={"host": host})).status_code == (503 if is_ours else 403)


async def test_names_can_be_told(monkeypatch):
    app = unloaded(host="listens.example", allowed_hosts=("LLM.example.", "other.example:8000"))
    async with asking(app) as client:
        for host, status in (
            ("llm.example:443", 503),
            ("other.example", 503),
            ("listens.example", 503),
            ("x.example", 403),
        ):
            assert (await client.get("/v1/models", headers={"host": host})).status_code == status, host
    async with asking(unloaded(allowed_hosts=("*",))) as client:
        assert (await client.get("/v1/models", headers={"host": "any.example"})).status_code == 503
        refused = await client.get("/v1/models", headers={"host": "any.example", "origin": "http://other.example"})
        assert refused.status_code == 403


@pytest.mark.parametrize(
    ("headers", "is_let_in"),
    [
        ({"origin": "http://127.0.0.1:8000", "sec-fetch-site": "same-origin"}, True),
        ({"origin": "http://LOCALHOST:8000", "host": "localhost:8000"}, True),
        ({"sec-fetch-site": "none"}, True),
        ({"origin": "http://127.0.0.1:3000"}, False),
        ({"origin": "http://localhost:8000"}, False),
        ({"origin": "null"}, False),
        ({"origin": ""}, False),
        ({"origin": "file://"}, False),
    ],
)
async def test_the_daemons_own_page_is_let_in_and_no_other(headers, is_let_in):
    async with asking(unloaded()) as client:
        answer = await client.post("/admin/cache/audit", headers={"host": "127.0.0.1:8000"} | headers)
        assert answer.status_code == (503 if is_let_in else 403)


@pytest.mark.parametrize("name", ["host", "origin", "sec-fetch-site"])
async def test_a_second_header_hides_nothing(name):
    good = {"host": "127.0.0.1", "origin": "http://127.0.0.1", "sec-fetch-site": "same-origin"}
    bad = {"host": "evil.example", "origin": "http://evil.example", "sec-fetch-site": "cross-site"}
    app = unloaded()
    for pair in ([good[name], bad[name]], [bad[name], good[name]]):
        headers = [("host", "127.0.0.1")] if name != "host" else []
        async with asking(app) as client:
            answer = await client.get("/v1/models", headers=headers + [(name, value) for value in pair])
            assert answer.status_code == 403


@pytest.mark.parametrize(
    "header",
    [
        *("x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-forwarded-server", "x-forwarded-port"),
        *("forwarded", "via", "x-real-ip", "x-client-ip", "true-client-ip", "cf-connecting-ip", "cf-ray"),
        *("x-original-forwarded-for", "x-envoy-external-address", "fastly-client-ip", "x-cluster-client-ip"),
        "X-Forwarded-Prefix",
    ],
)
async def test_what_a_proxy_on_this_machine_passes_on_is_not_from_this_machine(header):
    async with asking(unloaded()) as client:
        refused = await client.get("/admin/cache", headers={header: "127.0.0.1"})
        assert (refused.status_code, "--admin-key" in refused.text) == (403, True)
        assert (await client.get("/v1/models", headers={header: "127.0.0.1"})).status_code == 503
    async with asking(unloaded(admin_key=SecretStr("operator"))) as client:
        answer = await client.get("/admin/cache", headers={header: "10.0.0.1", "x-api-key": "operator"})
        assert answer.status_code == 503


@pytest.mark.parametrize(("key", "status"), [("client", 401), ("operator", 503)])
async def test_below_a_proxys_path_the_doors_are_the_same(key, status):
    """As routing sees it, and not as it was asked for: `/llm/admin/cache` is no client's path."""
    app = unloaded(api_keys=(SecretStr("client"),), admin_key=SecretStr("operator"))
    transport = httpx.ASGITransport(app, root_path="/llm")
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        assert (await client.get("/llm/admin/cache", headers={"x-api-key": key})).status_code == status
        assert (await client.get("/llm/livez")).status_code == 200


@pytest.mark.parametrize(("version", "status"), [("1.0", 403), ("1.1", 503)])
async def test_http_1_0_is_a_bare_proxys(version, status):
    app = unloaded()

    async def in_that_version(scope, receive, send):
        await app(scope | {"http_version": version}, receive, send)

    async with asking(in_that_version) as client:
        assert (await client.get("/admin/cache")).status_code == status


@pytest.mark.parametrize("content_type", [None, "", "text/plain", "application/x-www-form-urlencoded"])
@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/tokenize", "/detokenize", "/admin/cache/reset"])
async def test_a_body_has_to_say_that_it_is_json(client, path, content_type):
    headers = {} if content_type is None else {"content-type": content_type}
    refused = await client.post(path, content=b"{}", headers=headers)
    assert (refused.status_code, refused.json()["error"]["code"]) == (415, "unsupported_media_type")
    assert "content-type: application/json" in refused.json()["error"]["message"]


async def test_a_drain_can_be_undone_and_looked_at(client):
    drained = {"requests_running": 0, "requests_waiting": 0}
    for _ in range(2):
        assert (await client.post("/admin/drain")).json() == drained
    health = await client.get("/health")
    assert (health.status_code, health.json()["status"]) == (503, "draining")
    assert "/admin/undrain" in health.json()["reasons"][0]
    assert health.json()["drained"] is True
    refused = await client.post(CHAT, json=HELLO)
    assert (refused.status_code, "drained" in refused.json()["error"]["message"]) == (503, True)
    assert (await client.get("/admin/cache")).status_code == 200
    for _ in range(2):
        assert (await client.post("/admin/undrain")).json() == drained
    assert (await client.get("/readyz")).status_code == 200
    assert (await client.post(CHAT, json=HELLO)).status_code == 200


async def test_an_end_cannot_be_undone(settings):
    app = create_app(settings)
    await app.state.daemon.start()
    async with client_of(app) as client:
        assert await app.state.daemon.drain()
        refused = await client.post("/admin/undrain")
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "ending")
        health = (await client.get("/health")).json()
        assert (health["status"], health["drained"]) == ("draining", False)
    await app.state.daemon.stop()
