"""Two clients over HTTP: the queue is never full for one because of the other's requests alone."""

import asyncio

import pytest

from server.app import create_app
from server.isolation import Isolation
from tests.server.conftest import client_of
from tests.waiting import let_it_work

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}


def scope(key_number=None, address="10.0.0.1"):
    return {"state": {} if key_number is None else {"key_number": key_number}, "client": (address, 4000)}


def test_a_client_is_the_holder_of_a_key_or_without_keys_an_address():
    isolation = Isolation(is_by_key=False)
    assert isolation.client(scope(0)) == isolation.client(scope(0, address="10.0.0.2"))
    assert isolation.client(scope(0)) != isolation.client(scope(1))
    assert isolation.client(scope()) == isolation.client(scope())
    assert isolation.client(scope()) != isolation.client(scope(address="10.0.0.2"))
    assert isolation.client({"state": {}, "client": None}) == isolation.client({"state": {}})
    assert "10.0.0.1" not in isolation.client(scope())


async def test_a_light_client_is_served_beside_one_that_has_filled_its_share(settings):
    engine_settings = settings.engine.model_copy(update={"max_concurrency": 1, "max_pending_requests": 4})
    app = create_app(settings.model_copy(update={"engine": engine_settings}))
    engine = await app.state.daemon.start()
    async with client_of(app, ("10.0.0.1", 1)) as heavy, client_of(app, ("10.0.0.2", 1)) as light:
        long = HELLO | {"max_tokens": 60, "ignore_eos": True}
        first = asyncio.create_task(heavy.post(CHAT, json=long))
        while engine.snapshot().running < 1:
            await let_it_work()
        others = [asyncio.create_task(heavy.post(CHAT, json=long)) for _ in range(3)]
        while engine.snapshot().waiting < 3:
            await let_it_work()
        refused = await heavy.post(CHAT, json=HELLO)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "server_overloaded")
        served = await light.post(CHAT, json=HELLO)
        assert served.status_code == 200
        assert not others[2].done()
        assert {(await each).status_code for each in [first, *others]} == {200}
    await app.state.daemon.stop()
