"""Streams side by side, silent, slow or cut short, and who waits for room: S40 to S44."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import threading

import httpx
import pytest
import uvicorn

from engine.catalog import resolve_model
from server.app import create_app
from server.cli import run
from server.daemon import Daemon
from server.listener import url_of
from server.runner import start_up_line
from server.settings import CacheSettings, EngineSettings, ServerSettings, Settings
from server.sse import COMMENT, EventStream
from tests.e2e.conftest import run_daemon
from tests.scenarios.sse import events
from tests.scenarios.talking import collect
from tests.server.conftest import quiet_logging  # noqa: F401  (a fixture)
from tests.waiting import PATIENCE_SECONDS

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3, "temperature": 0}
FAR = 4000
LONG_PROMPT, CHUNK = 2000, 200
ENDLESS = HELLO | {"max_tokens": FAR, "ignore_eos": True, "stream": True}


def tokens(seed: int, count: int) -> tuple[int, ...]:
    """A prompt that shares nothing with that of another seed."""
    return (300 + seed, *(500 + (seed * 31 + index * 7) % 3000 for index in range(count - 1)))


@pytest.mark.anyio
async def test_s40_no_stream_misses_a_step_while_a_long_prompt_is_prefilled(talking, steps):
    """Each step holds at most one chunk of the prompt and a token for everybody, so no gap is longer than a step."""
    plans = []
    async with talking(max_concurrency=5, max_context=4096, prefill_chunk=CHUNK) as talk:
        streams = [talk.engine.submit(talk.request(tokens(seed, 20), max_tokens=100)) for seed in range(4)]
        names = {stream.request_id for stream in streams}
        for stream in streams:
            await anext(stream)
        steps.before = lambda _runner, plan: plans.append(plan)
        long = talk.request(tokens(9, LONG_PROMPT), max_tokens=1)
        await collect(talk.engine.submit(long))
        for stream in streams:
            await stream.aclose()
    during = [plan for plan in plans if any(each.request_id == long.request_id for each in plan.segments)]
    assert len(during) >= LONG_PROMPT // CHUNK
    for plan in during:
        sampled = {each.request_id for each in plan.segments if each.is_sampled}
        assert names <= sampled
        assert sum(len(each.token_ids) for each in plan.segments if each.request_id not in names) <= CHUNK


@pytest.mark.anyio
async def test_s41_a_prompt_that_fits_only_alone_waits_and_runs_and_what_fits_passes_it(talking, stand_still):
    async with talking(kv_pages=64, max_concurrency=4) as talk:
        reached, go = stand_still(1)
        running = talk.engine.submit(talk.request(tokens(1, 100), max_tokens=8))
        assert await asyncio.to_thread(reached.wait, 60)
        large, small = (talk.engine.submit(talk.request(tokens(seed, size))) for seed, size in ((2, 1000), (3, 20)))
        go.set()
        answers = []

        async def note(name, generation):
            answer = await collect(generation)
            answers.append(name)
            return answer

        first, second, third = await asyncio.gather(
            note("running", running), note("large", large), note("small", small)
        )
        assert answers == ["small", "running", "large"]
        assert [each.usage.completion_tokens for each in (first, second, third)] == [8, 2, 2]


@contextlib.asynccontextmanager
async def serving(send_buffer_bytes: int | None = None):
    """The whole server on a real socket, in this process; yields its address and its engine."""
    settings = Settings(
        server=ServerSettings(model="demo"),
        engine=EngineSettings(max_context=8192, max_concurrency=2, prefill_chunk=64),
        cache=CacheSettings(kv_pages=1024),
    )
    app = create_app(settings)
    engine = await app.state.daemon.start()
    listener = socket.create_server(("127.0.0.1", 0))
    if send_buffer_bytes is not None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)
    server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_config=None, timeout_graceful_shutdown=5))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield url_of(listener), engine
        await engine._loop.wait_until_empty()
        assert engine.check() == []
        counts = engine.snapshot()
        assert counts.kv_pages.pinned == counts.state_slots.pinned == counts.state_slots.in_flight == 0
    finally:
        await app.state.daemon.stop()
        server.should_exit = True
        await task


@contextlib.asynccontextmanager
async def not_reading(url: str, max_tokens: int):
    """A client that asks for a stream of large events and takes none of them; yields its socket."""
    host, port = url.removeprefix("http://").split(":")
    body = json.dumps(ENDLESS | {"max_tokens": max_tokens, "logprobs": True, "top_logprobs": 20}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\nconnection: close\r\n"
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    loop = asyncio.get_running_loop()
    with client:
        await loop.sock_connect(client, (host, int(port)))
        await loop.sock_sendall(client, f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        yield client


async def read_all(client: socket.socket) -> bytes:
    received = bytearray()
    while chunk := await asyncio.get_running_loop().sock_recv(client, 1 << 16):
        received += chunk
    return bytes(received)


@pytest.mark.anyio
async def test_s42_a_client_that_reads_slowly_holds_up_nobody_else_and_gets_everything(stand_still):
    async with serving(4096) as (url, _), httpx.AsyncClient(base_url=url, timeout=PATIENCE_SECONDS) as client:
        reached, go = stand_still(100)
        async with not_reading(url, 200) as slow:
            # By now there is far more for it than the buffers take.
            assert await asyncio.to_thread(reached.wait, 60)
            go.set()
            for streams in (False, True):
                answer = await client.post(CHAT, json=HELLO | {"stream": streams})
                assert answer.status_code == 200
            assert events(answer.text)[-1]["usage"]["completion_tokens"] > 0
            received = await read_all(slow)
        assert b'"completion_tokens":200' in received
        assert b"data: [DONE]" in received


@pytest.mark.anyio
async def test_s42_a_client_that_stops_reading_is_cancelled_after_the_limit(monkeypatch):
    def hasty(content):
        return EventStream(content, stall_limit_seconds=0.1)

    monkeypatch.setattr("server.answers.EventStream", hasty)
    async with serving(4096) as (url, engine), not_reading(url, FAR) as client:
        assert (await asyncio.get_running_loop().sock_recv(client, 12)).startswith(b"HTTP/1.1 200")
        await engine._loop.wait_until_empty()
        assert engine.snapshot().decode_tokens_total < FAR - 1
        assert b"[DONE]" not in await read_all(client)


@pytest.mark.anyio
@pytest.mark.parametrize("stage", ["prefilling", "queued"])
async def test_s43_silence_is_filled_with_comments(monkeypatch, stand_still, stage):
    def lively(content):
        return EventStream(content, keep_alive_seconds=0.01)

    monkeypatch.setattr("server.answers.EventStream", lively)
    body = HELLO | {"messages": [{"role": "user", "content": "sea " * 300}], "stream": True}
    async with serving() as (url, engine), httpx.AsyncClient(base_url=url, timeout=PATIENCE_SECONDS) as client:
        reached, go = stand_still(1)
        others = [asyncio.create_task(client.post(CHAT, json=body)) for _ in range(2 if stage == "queued" else 0)]
        if others:
            assert await asyncio.to_thread(reached.wait, 60)
        async with client.stream("POST", CHAT, json=body) as stream:
            received, comments = "", 0
            async for text in stream.aiter_text():
                received += text
                if received.count(COMMENT.decode()) >= 3 and not go.is_set():
                    assert await asyncio.to_thread(reached.wait, 60)
                    counts = engine.snapshot()
                    assert counts.waiting if stage == "queued" else (counts.prefilling, counts.waiting) == (1, 0)
                    comments = received.count(COMMENT.decode())
                    go.set()
        assert comments >= 3
        assert events(received)[-1]["usage"]["completion_tokens"] > 0
        await asyncio.gather(*others)


STREAMS = 3


@pytest.fixture
def daemon(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with run_daemon(resolve_model("demo"), "--max-context", "8192", "--max-concurrency", str(STREAMS)) as process:
        yield process


class Reader(threading.Thread):
    """Takes a whole stream; `has_begun` is set at its first token."""

    def __init__(self, url: str, body: dict[str, object]) -> None:
        super().__init__(daemon=True)
        self.url, self.body = url, body
        self.has_begun, self.text = threading.Event(), ""

    def run(self) -> None:
        with httpx.stream("POST", self.url + CHAT, json=self.body, timeout=PATIENCE_SECONDS) as stream:
            for text in stream.iter_text():
                self.text += text
                if self.text.count("data: ") > 1:
                    self.has_begun.set()


def begun(url: str, body: dict[str, object]) -> list[Reader]:
    readers = [Reader(url, body) for _ in range(STREAMS)]
    for reader in readers:
        reader.start()
    assert all(reader.has_begun.wait(PATIENCE_SECONDS) for reader in readers)
    return readers


def test_s44_sigterm_takes_no_more_lets_the_running_finish_and_exits_with_0(daemon):
    readers = begun(daemon.url, ENDLESS | {"max_tokens": 200})
    daemon.signal(signal.SIGTERM)
    daemon.wait_for_log("draining")
    refused = httpx.post(daemon.url + CHAT, json=HELLO, timeout=PATIENCE_SECONDS)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_unavailable")
    assert httpx.get(f"{daemon.url}/readyz", timeout=PATIENCE_SECONDS).status_code == 503
    for reader in readers:
        reader.join(60)
        assert events(reader.text)[-1]["usage"]["completion_tokens"] == 200
    assert daemon.process.wait(PATIENCE_SECONDS) == 0


def test_s44_a_second_sigterm_ends_each_stream_with_an_error_event(daemon):
    readers = begun(daemon.url, ENDLESS)
    daemon.signal(signal.SIGTERM)
    daemon.wait_for_log("draining")
    daemon.signal(signal.SIGTERM)
    for reader in readers:
        reader.join(60)
        *_, last = events(reader.text)
        assert last["error"]["code"] == "engine_unavailable"
    assert daemon.process.wait(PATIENCE_SECONDS) == 0
    assert "Traceback" not in "".join(daemon.log)


@pytest.mark.usefixtures("quiet_logging")
def test_s44_the_limit_ends_each_stream_with_an_error_event(monkeypatch):
    readers = []

    def ask_and_end(daemon, engine, url, seconds):
        def talk():
            readers.extend(begun(url, ENDLESS))
            os.kill(os.getpid(), signal.SIGTERM)

        threading.Thread(target=talk, daemon=True).start()
        return start_up_line(daemon, engine, url, seconds)

    monkeypatch.setattr("server.runner.start_up_line", ask_and_end)
    drain = Daemon.drain
    monkeypatch.setattr(Daemon, "drain", lambda daemon, _seconds: drain(daemon, 0.1))
    assert run(["serve", "demo", "--port", "0", "--max-context", "8192", "--max-concurrency", str(STREAMS)]) == 0
    assert len(readers) == STREAMS
    for reader in readers:
        reader.join(60)
        *_, last = events(reader.text)
        assert last["error"]["code"] == "engine_unavailable"
