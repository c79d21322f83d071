import asyncio
import json

import pytest
from starlette.requests import ClientDisconnect, Request

from server.answers import respond
from server.chat import Piece
from server.routes.chat import _ChatWriter
from server.routes.completions import _CompletionWriter
from server.schema.sampling import SamplingRequest
from server.sse import COMMENT, EventStream, event

pytestmark = pytest.mark.anyio


class Client:
    """The other end of an ASGI response."""

    def __init__(self):
        self.chunks = []
        self.received = asyncio.Event()
        self.left = asyncio.Event()

    async def send(self, message):
        if message["type"] == "http.response.body":
            self.chunks.append(message["body"])
            self.received.set()

    async def receive(self):
        await self.left.wait()
        return {"type": "http.disconnect"}

    def listen_to(self, stream):
        return asyncio.create_task(stream({"type": "http"}, self.receive, self.send))


async def test_events_come_in_order_and_the_body_ends():
    async def events():
        yield event({"a": 1})
        yield event({"b": "é"})

    client = Client()
    await client.listen_to(EventStream(events()))
    assert client.chunks == [b'data: {"a":1}\n\n', 'data: {"b":"é"}\n\n'.encode(), b""]


async def test_a_silent_stream_is_kept_alive_with_comments():
    speak = asyncio.Event()

    async def events():
        await speak.wait()
        yield b"data: 1\n\n"

    client = Client()
    task = client.listen_to(EventStream(events(), keep_alive_seconds=0.001))
    await client.received.wait()
    assert client.chunks[0] == COMMENT
    speak.set()
    await task
    assert client.chunks[-2:] == [b"data: 1\n\n", b""]


async def test_a_client_that_leaves_closes_the_events():
    closed = asyncio.Event()

    async def events():
        try:
            yield b"data: 1\n\n"
            await asyncio.Event().wait()
        finally:
            closed.set()

    client = Client()
    task = client.listen_to(EventStream(events()))
    await client.received.wait()
    client.left.set()
    with pytest.raises(ClientDisconnect):
        await task
    assert closed.is_set()


async def test_a_client_that_stops_reading_and_then_leaves_closes_the_events():
    closed = asyncio.Event()

    async def events():
        try:
            yield b"data: 1\n\n"
        finally:
            closed.set()

    class Stuck(Client):
        async def send(self, message):
            if message["type"] == "http.response.body":
                self.received.set()
                await asyncio.Event().wait()

    client = Stuck()
    stream = EventStream(events())
    task = client.listen_to(stream)
    await client.received.wait()
    client.left.set()
    with pytest.raises(ClientDisconnect):
        await task
    assert closed.is_set()
    assert stream is not None  # still held, so that nothing but the stream itself has closed them


async def test_a_client_that_leaves_while_nothing_was_asked_yet_closes_the_events():
    client = Client()
    client.left.set()
    stream = EventStream(never_asked())
    with pytest.raises(ClientDisconnect):
        await client.listen_to(stream)
    with pytest.raises(StopAsyncIteration):
        await anext(stream._events)


async def never_asked():
    await asyncio.Event().wait()
    yield b""


async def test_a_failure_of_the_events_comes_out():
    async def events():
        yield b"data: 1\n\n"
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await Client().listen_to(EventStream(events()))


async def test_a_client_that_stops_reading_is_gone_after_the_limit(caplog):
    closed = asyncio.Event()

    async def events():
        try:
            while True:
                yield b"data: 1\n\n"
        finally:
            closed.set()

    class Full(Client):
        async def send(self, message):
            await super().send(message)
            if len(self.chunks) == 3:
                await asyncio.Event().wait()

    client = Full()
    with pytest.raises(ClientDisconnect):
        await client.listen_to(EventStream(events(), stall_limit_seconds=0.01))
    assert len(client.chunks) == 3
    assert closed.is_set()
    assert "took nothing" in caplog.text


def chat_writer():
    return _ChatWriter("id", "model", None)


def echoing_writer():
    return _CompletionWriter("id", "model", None, ["Hello", "Hello"])


@pytest.mark.parametrize("writer", [chat_writer, echoing_writer])
async def test_no_chunk_of_an_answer_leaves_before_its_first_piece(writer):
    computed = [asyncio.Event(), asyncio.Event()]

    async def answer(index):
        await computed[index].wait()
        yield Piece("", f"piece {index}")
        await asyncio.Event().wait()

    request = Request({"type": "http", "state": {}})
    stream = await respond(request, SamplingRequest(stream=True, n=2), [answer(0), answer(1)], writer())
    client = Client()
    task = client.listen_to(stream)
    for index in (1, 0):
        sent = len(client.chunks)
        for _ in range(20):  # more turns of the loop than a chunk takes
            await asyncio.sleep(0)
        assert len(client.chunks) == sent
        computed[index].set()
        while not any(f"piece {index}".encode() in chunk for chunk in client.chunks):
            await asyncio.sleep(0)
        first = json.loads(client.chunks[sent].removeprefix(b"data: "))["choices"][0]
        assert first["index"] == index
        assert first.get("text") == "Hello" or first["delta"] == {"role": "assistant", "content": ""}
    client.left.set()
    with pytest.raises(ClientDisconnect):
        await task
