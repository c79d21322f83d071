"""The HTTP application on a real engine: what it answers, and how it refuses."""

import asyncio
import gzip
import itertools
import json
import string

import pytest
from pydantic import SecretStr

from engine.request import SamplingParams
from server.app import create_app
from server.chat import Piece, Prompt, submit
from server.settings import ServerSettings, Settings
from tests.server.conftest import MAX_CONTEXT, client_of

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "max_tokens": 6}
# The tiny model's template and bytes: <|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n
HELLO_TURN_TOKENS = 1 + 5 + 5 + 1 + 1
HELLO_TOKENS = HELLO_TURN_TOKENS + 1 + 10


_letters = iter(itertools.product(string.ascii_lowercase, repeat=5))


def fresh():
    """A body as long as HELLO that no test has sent yet."""
    return HELLO | {"messages": [{"role": "user", "content": "".join(next(_letters))}]}


def events(text):
    lines = [line for line in text.split("\n\n") if line and not line.startswith(":")]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


async def test_an_answer_has_openais_shape(client):
    body = (await client.post(CHAT, json=HELLO)).json()
    assert body["object"] == "chat.completion"
    assert body["model"] == "tiny"
    assert body["id"].startswith("chatcmpl-")
    [choice] = body["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["role"] == "assistant"
    assert len(choice["message"]["content"]) == 6
    assert "reasoning_content" not in choice["message"]


async def test_an_answer_tells_its_cost(client):
    body = (await client.post(CHAT, json=fresh())).json()
    assert body["usage"] == {
        "prompt_tokens": HELLO_TOKENS,
        "completion_tokens": 6,
        "total_tokens": HELLO_TOKENS + 6,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    lost = body["reuse"].pop("lost")
    # The template's own beginning may have been computed for another prompt, too short to be kept by itself.
    assert lost.keys() <= {"cold", "no_checkpoint"}
    assert sum(lost.values()) == HELLO_TURN_TOKENS
    assert body["reuse"] == {
        "path": "root",
        "prompt_tokens": HELLO_TOKENS,
        "cached_tokens": 0,
        "achievable_tokens": 0,
        "source": {"device": 0, "host": 0, "disk": 0},
    }
    timings = body["timings"]
    assert (timings["cache_n"], timings["prompt_n"], timings["predicted_n"]) == (0, HELLO_TOKENS, 6)
    assert timings["predicted_per_second"] == pytest.approx(6 / timings["predicted_ms"] * 1000, rel=1e-3)
    assert (timings["queue_ms"] > 0, timings["stalled_ms"], timings["preempted_ms"]) == (True, 0, 0)


async def test_the_same_body_again_tells_what_it_reused(client):
    body = fresh()
    await client.post(CHAT, json=body)
    again = (await client.post(CHAT, json=body)).json()
    cached = HELLO_TURN_TOKENS
    assert again["usage"]["prompt_tokens_details"] == {"cached_tokens": cached}
    assert (again["timings"]["cache_n"], again["timings"]["prompt_n"]) == (cached, HELLO_TOKENS - cached)
    assert again["reuse"] == {
        "path": "private_turn_closure",
        "prompt_tokens": HELLO_TOKENS,
        "cached_tokens": cached,
        "achievable_tokens": cached,
        "source": {"device": cached, "host": 0, "disk": 0},
        "lost": {},
    }


async def test_a_stream_says_the_same_as_the_whole_answer(client):
    await client.post(CHAT, json=HELLO)
    whole = (await client.post(CHAT, json=HELLO)).json()
    response = await client.post(CHAT, json=HELLO | {"stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    chunks = events(response.text)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert text == whole["choices"][0]["message"]["content"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert chunks[-1]["usage"] == whole["usage"]
    assert chunks[-1]["reuse"] == whole["reuse"]
    assert chunks[-1]["timings"]["predicted_n"] == 6


async def test_include_usage_adds_one_chunk_without_choices(client):
    response = await client.post(CHAT, json=HELLO | {"stream": True, "stream_options": {"include_usage": True}})
    *pieces, last = events(response.text)
    assert all(chunk["usage"] is None for chunk in pieces)
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == HELLO_TOKENS + 6
    assert last["reuse"]["prompt_tokens"] == HELLO_TOKENS


async def test_an_answer_that_begins_inside_a_think_block_is_reasoning(client):
    body = (await client.post(CHAT, json=HELLO | {"enable_thinking": True})).json()
    message = body["choices"][0]["message"]
    assert message["content"] == ""
    assert len(message["reasoning_content"]) == 6
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 6}


async def test_a_stop_string_does_not_end_the_thinking(client):
    asked = HELLO | {"enable_thinking": True}
    thought = (await client.post(CHAT, json=asked)).json()["choices"][0]["message"]["reasoning_content"]
    for stream in (False, True):
        answer = await client.post(CHAT, json=asked | {"stop": list(thought), "stream": stream})
        last = events(answer.text)[-1] if stream else answer.json()
        assert last["choices"][0]["finish_reason"] == "length"
        assert last["usage"]["completion_tokens"] == 6


async def test_no_effort_is_no_thinking(client):
    message = (await client.post(CHAT, json=HELLO | {"reasoning_effort": "none"})).json()["choices"][0]["message"]
    assert len(message["content"]) == 6
    assert "reasoning_content" not in message


async def test_the_same_seed_gives_the_same_answer(client):
    body = HELLO | {"temperature": 2, "seed": 5}
    first, second = [(await client.post(CHAT, json=body)).json()["choices"] for _ in range(2)]
    assert first == second


async def test_an_answer_without_a_limit_ends_at_the_default(client):
    body = {"messages": HELLO["messages"]}
    assert (await client.post(CHAT, json=body)).json()["usage"]["completion_tokens"] <= 8


@pytest.mark.parametrize("streams", [False, True])
async def test_a_prompt_over_the_context_is_refused_with_the_numbers(client, streams):
    body = {"messages": [{"role": "user", "content": "a" * MAX_CONTEXT}], "stream": streams}
    response = await client.post(CHAT, json=body)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "messages")
    assert str(MAX_CONTEXT) in error["message"]


async def test_a_huge_token_limit_ends_at_the_context(client):
    body = {"messages": [{"role": "user", "content": "a" * (MAX_CONTEXT - 40)}], "max_tokens": 2**62}
    answer = (await client.post(CHAT, json=body)).json()
    assert answer["usage"]["total_tokens"] == MAX_CONTEXT
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_what_the_template_refuses_is_a_bad_request(client):
    body = {"messages": [*HELLO["messages"], {"role": "system", "content": "Be short."}]}
    response = await client.post(CHAT, json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "messages")
    assert "the system message must be the first" in error["message"]


@pytest.mark.parametrize(
    ("content", "content_type", "status", "code"),
    [
        (b"{", "application/json", 400, "invalid_json"),
        (b"", "application/json", 400, "invalid_json"),
        (b"[]", "application/json", 400, "invalid_json"),
        (b'{"messages": NaN}', "application/json", 400, "invalid_json"),
        (b'{"temperature": 1e999}', "application/json", 400, "invalid_json"),
        (b'{"messages": "\xff"}', "application/json", 400, "invalid_json"),
        (b"[" * 5000, "application/json", 400, "invalid_json"),
        (b"{}", "text/plain", 415, "unsupported_media_type"),
        (b"{}", "application/json; charset=utf-8", 400, "invalid_value"),
        (b" " * (33 * 2**20), "application/json", 413, "request_too_large"),
    ],
)
async def test_a_body_that_cannot_be_read(client, content, content_type, status, code):
    response = await client.post(CHAT, content=content, headers={"content-type": content_type})
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/tokenize", "/detokenize", "/admin/cache/reset"])
@pytest.mark.parametrize("encoding", ["gzip", "br", "deflate, gzip"])
async def test_a_compressed_body_is_refused_unread_with_what_to_do(client, path, encoding):
    headers = {"content-type": "application/json", "content-encoding": encoding}
    response = await client.post(path, content=gzip.compress(b"{}"), headers=headers)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (415, "unsupported_media_type")
    assert "without content-encoding" in error["message"]
    assert response.headers["accept-encoding"] == "identity"
    plain = headers | {"content-encoding": "identity"}
    assert (await client.post(path, content=b"[", headers=plain)).json()["error"]["code"] == "invalid_json"


async def test_a_body_of_unknown_length_is_cut_off_at_the_limit(client):
    async def endless():
        for _ in range(40):
            yield b" " * 2**20

    response = await client.post(CHAT, content=endless(), headers={"content-type": "application/json"})
    assert response.status_code == 413


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nothing", 404), ("GET", CHAT, 405), ("DELETE", "/v1/models", 405), ("GET", "/v1/models/other", 404)],
)
async def test_every_refusal_has_openais_shape(client, method, path, status):
    response = await client.request(method, path)
    assert response.status_code == status
    assert response.json()["error"].keys() == {"message", "type", "param", "code"}


async def test_a_wrong_method_is_told_which_are_right(client):
    response = await client.delete("/v1/models")
    assert "expected GET" in response.json()["error"]["message"]
    assert "GET" in response.headers["allow"]


@pytest.mark.parametrize("path", ["/health", "/livez", "/readyz"])
async def test_probes_answer_to_head(client, path):
    assert (await client.head(path)).status_code == 200


async def test_a_text_that_can_never_fit_is_refused_before_it_is_encoded(client, monkeypatch):
    def encode(*_arguments, **_options):
        raise AssertionError("it was encoded")

    monkeypatch.setattr("tokenizers.Tokenizer.encode_batch", encode, raising=True)
    endless = HELLO | {"messages": [{"role": "user", "content": "endless " * 100_000}]}
    error = (await client.post(CHAT, json=endless)).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
    error = (await client.post("/v1/completions", json={"prompt": "endless " * 100_000})).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")


async def test_an_unknown_model_is_not_found(client):
    response = await client.post(CHAT, json=HELLO | {"model": "other"})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert "'tiny'" in error["message"]


async def test_the_model_is_listed_with_its_context(client):
    [card] = (await client.get("/v1/models")).json()["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == ("tiny", "model", MAX_CONTEXT)
    assert (await client.get("/v1/models/tiny")).json() == card


@pytest.mark.parametrize(
    ("given", "is_kept"),
    [
        ("abc-1.2:x_Y", True),
        ("a" * 128, True),
        ("a" * 129, False),
        ("with space", False),
        ('quote"', False),
        ("", False),
    ],
)
async def test_every_answer_has_a_request_id(client, given, is_kept):
    for method, path in (("GET", "/health"), ("GET", "/nothing"), ("POST", CHAT)):
        response = await client.request(method, path, headers={"x-request-id": given})
        assert (response.headers["x-request-id"] == given) is is_kept
        assert response.headers["x-request-id"]


async def test_health_is_ok_while_the_loop_turns(client):
    response = await client.get("/health")
    assert response.status_code == 200
    assert response.json() == {"status": "ok", "reasons": [], "reuse": "healthy", "faults": [], "drained": False}
    for probe in ("/livez", "/readyz"):
        assert (await client.get(probe)).json() == {"status": "ok"}


async def test_a_daemon_that_has_no_model_yet_says_so():
    async with client_of(create_app(Settings())) as client:
        health = await client.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "starting")
        assert (await client.get("/readyz")).status_code == 503
        assert (await client.get("/livez")).status_code == 200
        refused = await client.post(CHAT, json=HELLO)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_unavailable")
        assert refused.headers["retry-after"] == "1"


async def test_a_daemon_that_drains_or_has_stopped_says_so(settings):
    app = create_app(settings)
    await app.state.daemon.start()
    async with client_of(app) as client:
        assert await app.state.daemon.drain()
        assert (await client.get("/health")).json()["status"] == "draining"
        assert (await client.post(CHAT, json=HELLO)).status_code == 503
        await app.state.daemon.stop()
        assert (await client.get("/health")).status_code == 503


async def test_an_engine_that_died_is_unavailable(settings):
    app = create_app(settings)
    engine = await app.state.daemon.start()
    await engine.stop()
    async with client_of(app) as client:
        health = await client.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "unavailable")
        refused = await client.post(CHAT, json=HELLO)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_unavailable")


@pytest.fixture
async def client_of_busy(settings, request):
    """The only seat is taken until the test ends; the parameter holds the limits of the queue."""
    limits = request.param | {"max_concurrency": 1}
    app = create_app(settings.model_copy(update={"engine": settings.engine.model_copy(update=limits)}))
    engine = await app.state.daemon.start()
    seated = submit(engine, Prompt((5, 6)), SamplingParams(max_tokens=MAX_CONTEXT))
    await anext(seated)
    async with client_of(app) as client:
        yield client
    await seated.aclose()
    await app.state.daemon.stop()


@pytest.mark.parametrize("client_of_busy", [{"pending_timeout_s": 0.01}], indirect=True)
async def test_a_request_that_waited_too_long_gets_503_or_an_error_event(client_of_busy):
    whole = await client_of_busy.post(CHAT, json=HELLO)
    assert (whole.status_code, whole.json()["error"]["code"]) == (503, "queue_timeout")
    assert whole.headers["retry-after"] == "1"
    streamed = await client_of_busy.post(CHAT, json=HELLO | {"stream": True})
    assert events(streamed.text)[-1]["error"]["code"] == "queue_timeout"


@pytest.mark.parametrize("client_of_busy", [{"max_pending_requests": 0}], indirect=True)
async def test_a_full_queue_gets_429(client_of_busy):
    refused = await client_of_busy.post(CHAT, json=HELLO)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "server_overloaded")
    assert refused.headers["retry-after"] == "1"
    assert (await client_of_busy.get("/health")).status_code == 200


async def test_a_loop_that_does_not_turn_is_unavailable(settings, monkeypatch):
    app = create_app(settings)
    engine = await app.state.daemon.start()
    monkeypatch.setattr(engine, "heartbeat_age_seconds", lambda: 60.0)
    async with client_of(app) as client:
        health = await client.get("/health")
    await app.state.daemon.stop()
    assert (health.status_code, health.json()["status"]) == (503, "unavailable")
    assert "60 seconds" in health.json()["reasons"][0]


async def test_clients_that_leave_at_any_moment_leave_nothing_behind(settings):
    app = create_app(settings)
    engine = await app.state.daemon.start()
    async with client_of(app) as client:
        bodies = [HELLO | {"max_tokens": 200, "stream": index % 2 == 0} for index in range(24)]
        tasks = [asyncio.create_task(client.post(CHAT, json=body)) for body in bodies]
        for index, task in enumerate(tasks):
            if index % 3:
                task.cancel()
            for _ in range(index):
                await asyncio.sleep(0)
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    finished = [outcome.status_code for outcome in outcomes if not isinstance(outcome, asyncio.CancelledError)]
    assert finished == [200] * 8
    assert await engine.drain()
    assert engine.check() == []
    assert engine.snapshot().kv_pages.pinned == engine.snapshot().state_slots.pinned == 0
    await app.state.daemon.stop()


@pytest.mark.parametrize(
    ("headers", "is_let_in"),
    [
        ({"authorization": "Bearer first"}, True),
        ({"authorization": "bearer second"}, True),
        ({"x-api-key": "first"}, True),
        ({"authorization": "Bearer wrong"}, False),
        ({"authorization": "Basic first"}, False),
        ({"authorization": "Bearer"}, False),
        ({"x-api-key": "firs"}, False),
        ({"authorization": b"Bearer \xe9"}, False),
        ({}, False),
    ],
)
async def test_a_key_is_needed_where_keys_are_set(headers, is_let_in):
    keys = (SecretStr("first"), SecretStr("second"))
    async with client_of(create_app(Settings(server=ServerSettings(api_keys=keys)))) as client:
        response = await client.get("/v1/models", headers=headers)
        assert response.status_code == (503 if is_let_in else 401)
        if not is_let_in:
            assert response.json()["error"]["code"] == "invalid_api_key"
        assert (await client.get("/livez", headers=headers)).status_code == 200


async def test_an_exception_nobody_expected_is_an_error_without_its_text(client, monkeypatch, caplog):
    def fail(*_args):
        raise ZeroDivisionError("the secret is 17")

    monkeypatch.setattr("server.routes.chat.render_prompt", fail)
    response = await client.post(CHAT, json=HELLO, headers={"x-request-id": "abc"})
    assert response.status_code == 500
    assert response.headers["x-request-id"] == "abc"
    assert response.json()["error"]["code"] == "internal_error"
    assert "secret" not in response.text
    assert "request abc failed" in caplog.text


async def test_a_stream_that_fails_in_an_unexpected_way_ends_with_an_error(client, monkeypatch, caplog):
    async def fail(*_args, **_kwargs):
        yield Piece("", "Hel")
        raise ZeroDivisionError("the secret is 17")

    monkeypatch.setattr("server.routes.chat.pieces", fail)
    response = await client.post(CHAT, json=HELLO | {"stream": True})
    *_, last = events(response.text)
    assert last["error"]["code"] == "internal_error"
    assert "secret" not in response.text
    assert "a stream failed" in caplog.text


async def test_the_api_page_describes_what_routes_take_and_answer(client):
    page = (await client.get("/openapi.json")).json()
    operation = page["paths"][CHAT]["post"]
    reference = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    properties = page["components"]["schemas"][reference.rpartition("/")[2]]["properties"]
    assert {"messages", "temperature", "stream", "seed"} <= properties.keys()
    assert {"200", "400", "401", "403", "404", "413", "415", "429", "500", "503"} == operation["responses"].keys()
    references = set(json.dumps(page).split('"#/components/schemas/')[1:])
    assert {part.partition('"')[0] for part in references} <= page["components"]["schemas"].keys()
    assert (await client.get("/docs")).status_code == 200
