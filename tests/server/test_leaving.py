"""A request that breaks off ends its answers, wherever the daemon was at that moment."""

import asyncio
import itertools

import pytest

from server.app import create_app
from server.responses import to_json
from tests.server.conftest import client_of
from tests.server.test_door import CHAT, HELLO
from tests.waiting import PATIENCE_SECONDS, let_it_work

pytestmark = pytest.mark.anyio

MOST_TURNS = 60
"""Of the event loop, before the client leaves: from before the request is read until its answer streams."""
LONG = HELLO | {"max_tokens": 300, "ignore_eos": True}
STREAMED = LONG | {"stream": True}


@pytest.fixture
async def served(settings):
    """The app, its engine, and the answers that were asked of it: something may hold them for longer than the request,
    such as a traceback."""
    app = create_app(settings)
    engine = await app.state.daemon.start()
    answers, submit = [], engine.submit
    engine.submit = lambda request: answers.append(submit(request)) or answers[-1]
    yield app, engine, answers
    await app.state.daemon.stop()


async def rest(engine):
    """Until nothing runs and nothing waits; returns whether something did."""
    now = engine.snapshot()
    did_work = bool(now.running or now.waiting)
    while now.running or now.waiting:
        await let_it_work()
        now = engine.snapshot()
    return did_work


@pytest.mark.parametrize("body", [LONG, STREAMED, STREAMED | {"n": 2}])
async def test_a_client_may_leave_at_any_turn_of_the_event_loop(served, body):
    app, engine, answers = served
    began = 0
    async with client_of(app) as client, asyncio.timeout(PATIENCE_SECONDS):
        for turns in itertools.count():
            asking = asyncio.create_task(client.post(CHAT, json=body))
            for _ in range(turns):
                # Beyond the usual turns only where the threads that the request needs have hardly a core.
                await (asyncio.sleep(0) if turns < MOST_TURNS else let_it_work())
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            began += await rest(engine)
            if turns >= MOST_TURNS and began > 3:
                break
    assert began > 3
    assert engine.snapshot().decode_tokens_total < 100 * len(answers)


@pytest.mark.parametrize("body", [STREAMED, STREAMED | {"n": 2}])
async def test_a_stream_whose_first_bytes_cannot_be_sent_ends_its_answers(served, body):
    app, engine, answers = served
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": CHAT, "headers": headers, "query_string": b"", "state": {}}
    scope["client"] = ("127.0.0.1", 1)
    bodies = [to_json(body)]

    async def receive():
        if not bodies:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": bodies.pop(), "more_body": False}

    async def send(_message):
        raise OSError("the connection is gone")

    async with asyncio.timeout(PATIENCE_SECONDS):
        await app(scope, receive, send)
        await rest(engine)
    assert len(answers) == body.get("n", 1)
    assert engine.snapshot().decode_tokens_total < 100 * len(answers)
