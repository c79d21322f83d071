"""`/metrics` over HTTP: what requests add to it, and what it never holds."""

import pytest

from server.app import create_app
from server.settings import Settings
from tests.ops.test_metrics import read
from tests.server.conftest import client_of
from tests.server.test_door import CHAT, HELLO, events

pytestmark = pytest.mark.anyio
SECRET = "the secret is 17"


def requests(metrics, outcome):
    return read(metrics)["dalsegno_requests_total", CHAT, outcome]


async def test_requests_are_counted_by_how_they_end(settings, monkeypatch):
    app = create_app(settings)
    metrics = app.state.daemon.metrics
    await app.state.daemon.start()
    body = HELLO | {"messages": [{"role": "user", "content": SECRET}]}
    async with client_of(app) as client:
        whole = (await client.post(CHAT, json=body | {"n": 2})).json()
        await client.post(CHAT, json=body | {"stream": True})
        await client.post(CHAT, json=body | {"temperature": 9})

        async def fail(*_args, **_kwargs):
            raise ZeroDivisionError(SECRET)
            yield

        monkeypatch.setattr("server.routes.chat.pieces", fail)
        await client.post(CHAT, json=body | {"stream": True})
        page = await client.get("/metrics")
    await app.state.daemon.stop()
    assert page.headers["content-type"].startswith("text/plain")
    assert SECRET not in page.text
    assert [requests(metrics, each) for each in ("ok", "bad_request", "error")] == [2, 1, 1]
    found = read(metrics)
    assert found["dalsegno_prompt_tokens_total",] == 3 * whole["usage"]["prompt_tokens"]
    assert found["dalsegno_generation_tokens_total",] == 3 * 6
    assert sum(found["dalsegno_time_to_first_token_seconds_count", reuse] for reuse in ("hit", "root")) == 3
    assert found["dalsegno_step_seconds_count", "decode"] > 0


async def test_s60_the_answers_and_the_counters_say_the_same(settings):
    app = create_app(settings)
    await app.state.daemon.start()
    answers = []
    async with client_of(app) as client:
        for content in ("Hello", "Hello", "Hello there", "Hello"):
            body = HELLO | {"messages": [{"role": "user", "content": content}]}
            answers.append((await client.post(CHAT, json=body)).json())
            answers.append(events((await client.post(CHAT, json=body | {"stream": True})).text)[-1])
    await app.state.daemon.stop()
    found = read(app.state.daemon.metrics)
    cached = sum(answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers)
    assert cached > 0
    assert cached == found["dalsegno_reuse_achieved_tokens_total",]
    assert cached == sum(found["dalsegno_prompt_tokens_by_source_total", tier] for tier in ("device", "host", "disk"))
    assert sum(answer["usage"]["prompt_tokens"] for answer in answers) == found["dalsegno_prompt_tokens_total",]


async def test_a_daemon_without_a_model_has_metrics():
    async with client_of(create_app(Settings())) as client:
        await client.post(CHAT, json=HELLO)
        page = (await client.get("/metrics")).text
    assert 'dalsegno_requests_total{endpoint="/v1/chat/completions",outcome="error"} 1.0' in page
