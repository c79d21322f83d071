"""Who is refused is told why, at once, and holds nothing: S23, S38, S39, S41, S48 and S49, against the real daemon."""

from __future__ import annotations

import contextlib
import re
import time

import httpx
import pytest

from engine.catalog import resolve_model
from tests.e2e.conftest import run_daemon
from tests.scenarios.sse import events
from tests.server.other_servers import EFFECTS, WITHOUT_EFFECT
from tests.waiting import PATIENCE_SECONDS

MAX_CONTEXT = 4096
PENDING = 2
FLAGS = (
    *("--max-concurrency", "1", "--max-pending-requests", str(PENDING)),
    *("--max-context", str(MAX_CONTEXT), "--kv-pages", str(MAX_CONTEXT // 16)),
)
CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2, "temperature": 0}
LONG = HELLO | {"max_tokens": MAX_CONTEXT, "ignore_eos": True, "stream": True}


@contextlib.contextmanager
def serving(*flags):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        with run_daemon(resolve_model("demo"), *FLAGS, *flags) as process:
            yield process


@pytest.fixture(scope="module")
def client():
    """Of a daemon with one seat."""
    with serving() as daemon, httpx.Client(base_url=daemon.url, timeout=PATIENCE_SECONDS) as client:
        yield client


@pytest.fixture(scope="module")
def impatient_daemon():
    """One seat too, and nobody waits long for it."""
    with serving("--pending-timeout-s", "0.2") as daemon:
        yield daemon


@contextlib.contextmanager
def taken_seat(client):
    """The only seat is taken, by an answer that is far from its end; when this is left, nothing is held."""
    with client.stream("POST", CHAT, json=LONG) as stream:
        assert stream.status_code == 200
        lines = (line for line in stream.iter_lines() if "content" in line)
        next(lines)
        yield
    assert held(client) == {}


@contextlib.contextmanager
def full_queue(client):
    """As many wait for the seat as may."""
    with contextlib.ExitStack() as stack:
        for _ in range(PENDING):
            stack.enter_context(client.stream("POST", CHAT, json=LONG))
        yield


def held(client) -> dict[str, float]:
    """What `/metrics` says that requests hold, once nobody is served any more."""
    names = r"dalsegno_requests_(?:running|waiting)|dalsegno_cache_units\{[^}]*state=\"(?:pinned|in_flight)\"\}"
    for _ in range(1000):
        page = client.get("/metrics").text
        counts = {name: float(count) for name, count in re.findall(rf"^({names}) (\S+)$", page, re.MULTILINE)}
        assert len(counts) == 2 + 4 * 2
        if not any(counts.values()):
            break
        time.sleep(0.01)
    return {name: count for name, count in counts.items() if count}


BAD = {
    "context": (HELLO | {"messages": [{"role": "user", "content": "fox " * MAX_CONTEXT}]}, "messages"),
    "schema": (HELLO | {"temperature": "warm"}, "temperature"),
    "tool schema": (HELLO | {"tools": [{"type": "function", "function": {"name": 5}}]}, "tools[0].function.name"),
    "template": (HELLO | {"chat_template_kwargs": {"namespace": "not to be called"}}, "messages"),
}


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("what", BAD)
def test_s23_what_is_refused_for_what_it_says_holds_nothing(client, what, streams):
    body, param = BAD[what]
    for _ in range(3):
        refused = client.post(CHAT, json=body | {"stream": streams})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    assert held(client) == {}
    assert client.post(CHAT, json=HELLO).status_code == 200


def test_s23_what_finds_the_queue_full_holds_nothing(client):
    with taken_seat(client), full_queue(client):
        assert client.post(CHAT, json=HELLO).status_code == 429
    assert client.post(CHAT, json=HELLO).status_code == 200


def test_s23_s38_who_outlives_the_wait_limit_is_told_alike_streamed_or_not_and_logged_once(impatient_daemon):
    daemon = impatient_daemon
    with httpx.Client(base_url=daemon.url, timeout=PATIENCE_SECONDS) as client, taken_seat(client):
        plain = client.post(CHAT, json=HELLO, headers={"x-request-id": "s38-plain"})
        streamed = client.post(CHAT, json=HELLO | {"stream": True}, headers={"x-request-id": "s38-streamed"})
    assert (plain.status_code, plain.json()["error"]["code"]) == (503, "queue_timeout")
    assert plain.headers["retry-after"] == "1"
    assert streamed.status_code == 200
    *_, error = events(streamed.text)
    assert {**error["error"], "message": ""} == {**plain.json()["error"], "message": ""}
    for request_id in ("s38-plain", "s38-streamed"):
        daemon.wait_for_log(request_id)
    logged = [line for line in daemon.log if "s38-" in line]
    assert len(logged) == 2
    assert all('"request_error"' in line and '"queue_timeout"' in line for line in logged)


def test_s39_a_full_queue_refuses_with_a_time_to_retry_and_health_stays_well(client):
    with taken_seat(client), full_queue(client):
        for streams in (False, True):
            refused = client.post(CHAT, json=HELLO | {"stream": streams})
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "server_overloaded")
            assert int(refused.headers["retry-after"]) > 0
        health = client.get("/health")
        assert (health.status_code, health.json()["status"]) == (200, "ok")


def test_s41_a_prompt_that_can_never_fit_is_refused_at_once_with_the_numbers(client):
    body = BAD["context"][0]
    with taken_seat(client), full_queue(client):
        refused = client.post(CHAT, json=body)
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (400, "context_length_exceeded")
    limit, given, *_ = (int(number) for number in re.findall(r"\d+", error["message"]))
    assert given > limit == MAX_CONTEXT


@pytest.mark.parametrize("kind", ["json_object", "json_schema"])
def test_s48_a_response_format_that_is_not_enforced_yet_is_refused_by_name(client, kind):
    refused = client.post(CHAT, json=HELLO | {"response_format": {"type": kind, "json_schema": {"name": "a"}}})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "response_format")


def test_s49_a_field_that_would_change_the_output_and_is_not_built_is_refused_by_name(client):
    for name, effect, _default in (each for documented in EFFECTS.values() for each in documented):
        refused = client.post(CHAT, json=HELLO | {name: effect})
        error = refused.json()["error"]
        assert (refused.status_code, error["code"], error["param"]) == (400, "unsupported_parameter", name)
        assert name in error["message"]


def test_s49_neutral_values_and_unknown_fields_change_nothing(client):
    plain = client.post(CHAT, json=HELLO).json()["choices"]
    for server, documented in EFFECTS.items():
        neutral = {name: default for name, _effect, default in documented}
        answer = client.post(CHAT, json=HELLO | neutral | WITHOUT_EFFECT.get(server, {}) | {"never heard of": 1})
        assert (answer.status_code, answer.json().get("choices")) == (200, plain)
