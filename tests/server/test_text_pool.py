"""The work on text: off the event loop, in turns, and ended when nobody waits for it."""

import asyncio
import json
import threading

import pytest

from engine.catalog import resolve_model
from engine.text.slices import LONG
from engine.text.tokenizer import Tokenizer
from server.text_pool import TextPool
from tests.server.conftest import MAX_CONTEXT
from tests.server.test_door import CHAT

pytestmark = pytest.mark.anyio


@pytest.fixture
def pool():
    pool = TextPool()
    yield pool
    pool.close()


def endless(slices: list[str]):
    while True:
        slices.append(threading.current_thread().name)
        yield


async def test_the_event_loop_turns_while_a_text_is_encoded(pool):
    tokenizer = Tokenizer.load(resolve_model("demo"))
    asked = asyncio.create_task(pool.run(tokenizer.text_encoder.encode("0123456789" * 15_000)))
    turns = 0
    while not asked.done():
        await asyncio.sleep(0.001)
        turns += 1
    assert len(asked.result().token_ids) == 150_000
    assert turns > 20


async def test_the_event_loop_turns_while_tokens_are_decoded(pool):
    tokenizer = Tokenizer.load(resolve_model("demo"))

    def decode():
        yield
        return tokenizer.decode([600] * 400_000)

    asked = asyncio.create_task(pool.run(decode()))
    turns = 0
    while not asked.done():
        await asyncio.sleep(0.001)
        turns += 1
    assert turns > 20


async def test_work_that_is_cancelled_ends_with_its_slice(pool):
    slices: list[str] = []
    task = asyncio.create_task(pool.run(endless(slices)))
    while len(slices) < 3:
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.gather(*(pool.run(_once()) for _ in range(4)))
    done = len(slices)
    await asyncio.gather(*(pool.run(_once()) for _ in range(4)))
    assert len(slices) == done
    assert all(name.startswith("dalsegno-text") for name in slices)


def _once():
    yield
    return None


async def test_short_work_has_its_turn_beside_any_number_of_long_ones(pool):
    long = [asyncio.create_task(pool.run(endless([]))) for _ in range(8)]
    await asyncio.sleep(0)
    assert await pool.run(_once()) is None
    for task in long:
        task.cancel()
    await asyncio.gather(*long, return_exceptions=True)


async def test_slices_that_cannot_be_cut_keep_only_each_other_waiting(pool):
    may_end = threading.Event()

    def one_word():
        yield LONG
        may_end.wait()
        return threading.current_thread().name

    long = [asyncio.create_task(pool.run(one_word())) for _ in range(8)]
    await asyncio.sleep(0)
    assert await pool.run(_once()) is None
    may_end.set()
    assert {name.partition("_")[0] for name in await asyncio.gather(*long)} == {"dalsegno-long-text"}


@pytest.mark.parametrize("max_tokens", [None, 400_000])
def test_a_word_beyond_some_length_is_told_to_be_long(max_tokens):
    encoder = Tokenizer.load(resolve_model("demo")).text_encoder

    def paces(length):
        return list(encoder.encode("0123456789" * (length // 10), max_tokens=max_tokens))

    assert paces(1_000) == []
    assert paces(100_000) == [not LONG]
    assert paces(200_000) == [LONG]


async def test_what_fails_in_the_pool_fails_where_it_was_asked_for(pool):
    def fails():
        yield
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await pool.run(fails())


@pytest.fixture
def encoded(client, monkeypatch):
    """The texts that were asked to be encoded."""
    engine = client._transport.app.state.daemon.engine
    texts = []

    def counted(encoder):
        encode = encoder.encode

        def count(text, **options):
            texts.append(text)
            return encode(text, **options)

        monkeypatch.setattr(encoder, "encode", count)

    counted(engine.tokenizer.text_encoder)
    counted(engine.chat_encoder)
    return texts


async def test_nothing_is_encoded_after_the_first_prompt_that_does_not_fit(client, encoded):
    response = await client.post("/v1/completions", json={"prompt": ["a" * 1000] * 25})
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert len(encoded) == 1


async def test_a_conversation_that_no_encoding_makes_fit_is_not_even_rendered(client, encoded, monkeypatch):
    written = []
    template = client._transport.app.state.daemon.engine.chat_template
    monkeypatch.setattr(template, "write", lambda *_args, **_options: written.append(1))
    messages = [{"role": "user", "content": "endless " * 20_000}]
    response = await client.post(CHAT, json={"messages": messages})
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert (encoded, written) == ([], [])


async def test_a_conversation_that_does_not_fit_is_rendered_once(client, monkeypatch):
    written = []
    template = client._transport.app.state.daemon.engine.chat_template
    write = template.write

    def counted(*args, **options):
        written.append(1)
        return write(*args, **options)

    monkeypatch.setattr(template, "write", counted)
    response = await client.post(CHAT, json={"messages": [{"role": "user", "content": "a" * MAX_CONTEXT}]})
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert len(written) == 1


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize", CHAT])
async def test_no_text_is_worked_on_once_its_client_left(client, encoded, path):
    app = client._transport.app
    prompts = {"prompt": ["a"] * 128, "max_tokens": 1} if path == "/v1/completions" else {"prompt": "a"}
    body = {"messages": [{"role": "user", "content": "a"}]} if path == CHAT else prompts
    left = [{"type": "http.request", "body": json.dumps(body).encode()}, {"type": "http.disconnect"}]
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"host", b"localhost")],
        "client": ("127.0.0.1", 1),
    }
    sent = []

    async def receive():
        return left.pop(0) if left else {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    await app(scope, receive, send)
    assert sent == []
    assert len(encoded) <= 2
