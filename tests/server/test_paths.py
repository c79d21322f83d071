"""Paths as clients of other servers write them."""

import pytest

from server.app import create_app
from server.paths import canonical
from server.version import package_version
from tests.server.conftest import client_of
from tests.server.test_door import CHAT, HELLO

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/v1//chat/completions/", "/v1/chat/completions"),
        ("//v1/completions", "/v1/completions"),
        ("/models", "/v1/models"),
        ("/models/org/name", "/v1/models/org/name"),
        ("/v1/models/", "/v1/models"),
        ("/v1/health", "/health"),
        ("/v1/tokenize", "/tokenize"),
        ("//admin/drain/", "/admin/drain"),
        ("/", "/"),
        ("//", "/"),
        ("/v1", "/v1"),
        ("/completion", "/completion"),
        ("/modelsx", "/modelsx"),
        ("/admin/requests/models", "/admin/requests/models"),
    ],
)
def test_each_path_has_one_spelling(path, expected):
    assert canonical(path) == canonical(expected) == expected


async def test_a_base_url_without_its_version_or_with_two_is_answered(client):
    for path in ("/chat/completions", "/v1/v1/chat/completions", "/v1/chat/completions/"):
        assert (await client.post(path, json=HELLO)).status_code == 200
    assert (await client.post("/completions", json={"prompt": "a", "max_tokens": 1})).json()[
        "object"
    ] == "text_completion"
    for path in ("/models", "/v1/models/"):
        assert (await client.get(path)).json()["object"] == "list"
    assert (await client.get("/models/tiny")).json()["id"] == "tiny"
    record = (await client.get("/admin/requests?limit=1")).json()["requests"][0]
    assert record["endpoint"] == "/v1/completions"


async def test_another_spelling_needs_the_same_key(settings):
    server = settings.server.model_copy(update={"admin_key": "a" * 9})
    app = create_app(
        settings.model_copy(update={"server": server.model_validate({"api_keys": ["k"], "admin_key": "a"})})
    )
    async with client_of(app) as client:
        for method, path in (
            ("GET", "/models"),
            ("GET", "/metrics/"),
            ("POST", "/admin//drain/"),
            ("HEAD", "/metrics"),
        ):
            assert (await client.request(method, path)).status_code == 401, path
        for path in ("/version", "/health/"):
            assert (await client.get(path)).status_code != 401


async def test_what_other_clients_ask_for_is_answered(client):
    assert (await client.get("/version")).json() == {"version": package_version()}
    for method in ("GET", "POST", "HEAD"):
        assert (await client.request(method, "/ping")).status_code == 200


async def test_head_is_answered_wherever_get_is(client):
    paths = [
        path for path, operations in (await client.get("/openapi.json")).json()["paths"].items() if "get" in operations
    ]
    fixed = [path for path in paths if "{" not in path and path != "/insights/stream"]
    assert {"/v1/models", "/metrics", "/health", "/livez", "/readyz", "/version", "/insights"} <= set(fixed)
    for path in (*fixed, "/v1/models/tiny", "/", "/docs"):
        assert (await client.head(path)).status_code == 200, path
    assert (await client.head("/insights/stream")).status_code == 405
    assert (await client.head(CHAT)).status_code == 405


@pytest.mark.parametrize(
    ("method", "path", "whose"),
    [
        ("POST", "/api/chat", "Ollama"),
        ("GET", "/api/tags", "Ollama"),
        ("POST", "/completion", "llama.cpp"),
        ("POST", "/infill", "llama.cpp"),
        ("GET", "/props", "llama.cpp"),
        ("GET", "/slots/0", "llama.cpp"),
        ("POST", "/generate", "SGLang"),
        ("POST", "/v1/embeddings", "embedding"),
        ("POST", "/embeddings", "embedding"),
        ("POST", "/v1/rerank", "reranking"),
        ("POST", "/v1/audio/transcriptions", "audio"),
        ("POST", "/v1/images/generations", "images"),
    ],
)
async def test_a_path_of_another_api_says_what_is_spoken_here(client, method, path, whose):
    response = await client.request(method, path, json={} if method == "POST" else None)
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (404, "not_found_error")
    assert whose in error["message"]
    assert "POST /v1/chat/completions" in error["message"]


async def test_any_other_path_is_not_found(client):
    assert "/docs lists" in (await client.get("/nothing/api")).json()["error"]["message"]
