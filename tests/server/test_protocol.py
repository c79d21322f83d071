"""One connection's HTTP: what a client offers, withholds or overdoes."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass

import pytest
from fastapi import FastAPI, Request, Response

from ops.connections import ConnectionEnd
from server.app import create_app
from server.door import Door
from server.listener import listen, raise_descriptor_limit
from server.runner import _Server, http_config
from server.settings import ServerSettings, Settings

OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
BODY = b'{"text": "' + b"x" * 1000 + b'"}'


@dataclass
class Served:
    """A daemon's HTTP around an application of these tests."""

    port: int
    door: Door
    is_asked: asyncio.Event
    """Set when a request reached `/wait`."""
    may_answer: asyncio.Event
    """What `/wait` waits for."""


def _echo(is_asked: asyncio.Event | None = None, may_answer: asyncio.Event | None = None) -> FastAPI:
    app = FastAPI()

    @app.post("/echo")
    async def echo(request: Request) -> dict[str, int | str]:
        return {"bytes": len(await request.body()), "offer": request.headers.get("upgrade", "none")}

    @app.get("/wait")
    async def wait() -> str:
        assert is_asked is not None
        assert may_answer is not None
        is_asked.set()
        await may_answer.wait()
        return "waited"

    @app.get("/answer/{size}")
    async def answer(size: int) -> Response:
        return Response(b"x" * size)

    return app


@asynccontextmanager
async def _serving(settings: Settings, app: FastAPI | None = None) -> AsyncIterator[Served]:
    listener = listen("127.0.0.1", 0)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # so that what is not read is soon not written
    is_asked, may_answer = asyncio.Event(), asyncio.Event()
    config = http_config(app or _echo(is_asked, may_answer), settings)
    server = _Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield Served(listener.getsockname()[1], config.door, is_asked, may_answer)
    finally:
        may_answer.set()
        server.should_exit = True
        await serving


async def _exchange(port: int, *pieces: bytes) -> bytes:
    """Everything that is answered until the daemon closes; each piece is a read of its own where there are several."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for piece in pieces:
        writer.write(piece)
        await writer.drain()
        await asyncio.sleep(0)
    answer = await reader.read()
    writer.close()
    return answer


def _ask(*pieces: bytes, settings: Settings | None = None, app: FastAPI | None = None) -> bytes:
    async def ask() -> bytes:
        async with _serving(settings or Settings(), app) as served:
            return await _exchange(served.port, *pieces)

    return asyncio.run(asyncio.wait_for(ask(), 30))


def _post(extra: bytes, body: bytes = BODY) -> bytes:
    return b"POST /echo HTTP/1.1\r\nHost: localhost\r\n" + extra + b"Content-Length: %d\r\n\r\n" % len(body) + body


LAST = b"POST /echo HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}"


@pytest.mark.parametrize("size", [1, 64, 100_000])
def test_an_offer_of_another_protocol_is_ignored_and_the_body_is_kept(size: int) -> None:
    sent = _post(OFFER)
    pieces = [sent[start : start + size] for start in range(0, len(sent), size)]
    answer = _ask(*pieces, LAST)
    assert answer.count(b"HTTP/1.1 200 OK") == 2
    assert b'{"bytes":%d,"offer":"none"}' % len(BODY) in answer
    assert answer.endswith(b'{"bytes":2,"offer":"none"}')


def test_offers_one_behind_another_and_a_chunked_body_are_kept_too() -> None:
    chunked = b"POST /echo HTTP/1.1\r\nHost: localhost\r\n" + OFFER + b"Transfer-Encoding: chunked\r\n\r\n"
    answer = _ask(_post(OFFER) + chunked + b"3\r\nabc\r\n0\r\n\r\n" + LAST)
    assert answer.count(b"HTTP/1.1 200 OK") == 3
    assert b'{"bytes":3,"offer":"none"}' in answer


def test_a_websocket_is_answered_in_http() -> None:
    offer = b"Connection: close, Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: x\r\nSec-WebSocket-Version: 13\r\n"
    answer = _ask(b"GET /echo HTTP/1.1\r\nHost: localhost\r\n" + offer + b"\r\n")
    assert answer.startswith(b"HTTP/1.1 405 ")


def test_connect_is_refused() -> None:
    assert _ask(b"CONNECT example.org:443 HTTP/1.1\r\nHost: example.org:443\r\n\r\n").startswith(b"HTTP/1.1 400 ")


def test_a_connection_is_kept_as_long_as_others_keep_it() -> None:
    settings = Settings(server=ServerSettings())
    assert http_config(create_app(settings), settings).timeout_keep_alive == 75


def _limited(**limits: float) -> Settings:
    return Settings(server=ServerSettings.model_validate(limits))


def _ended(settings: Settings, *pieces: bytes) -> tuple[bytes, Door]:
    """What is answered, and the door behind it."""

    async def ask() -> tuple[bytes, Door]:
        async with _serving(settings) as served:
            return await _exchange(served.port, *pieces), served.door

    return asyncio.run(asyncio.wait_for(ask(), 30))


def _told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "dalsegno.http"]


@pytest.mark.parametrize(
    ("sent", "status", "reason"),
    [
        pytest.param(b"POST /echo HTTP/1.1\r\nHost: loc", b"408", ConnectionEnd.HEADER_TIMEOUT, id="half a header"),
        pytest.param(b"\r\n", b"408", ConnectionEnd.HEADER_TIMEOUT, id="less than a header"),
        pytest.param(_post(b"")[:-5], b"408", ConnectionEnd.BODY_TIMEOUT, id="half a body"),
        pytest.param(b"no HTTP\r\n\r\n", b"400", ConnectionEnd.MALFORMED, id="no HTTP"),
    ],
)
def test_what_is_withheld_is_ended_by_its_deadline_and_counted(
    sent: bytes, status: bytes, reason: ConnectionEnd, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "dalsegno.http")
    answer, door = _ended(_limited(header_timeout_s=0.05, body_timeout_s=0.05), sent)
    assert answer.startswith(b"HTTP/1.1 " + status)
    assert door.ended == {reason: 1}
    assert door.open == 0
    assert [line.rpartition("; ")[2] for line in _told(caplog)] == ["1 so far"]


def test_a_body_that_drips_is_ended_though_it_never_stands_still() -> None:
    async def drip() -> Door:
        async with _serving(_limited(body_timeout_s=0.2)) as served:
            reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
            writer.write(_post(b"")[: -len(BODY)])
            ends = asyncio.create_task(reader.read())
            for byte in BODY:
                writer.write(bytes([byte]))
                await asyncio.wait({ends}, timeout=0.005)
                if ends.done():
                    break
            writer.close()
            # Whoever still sends while the daemon closes may see a reset in place of the answer.
            with suppress(ConnectionError):
                await ends
            return served.door

    assert asyncio.run(asyncio.wait_for(drip(), 30)).ended == {ConnectionEnd.BODY_TIMEOUT: 1}


def test_a_body_behind_an_answer_has_no_more_time() -> None:
    """A route that does not read its body answers at once; what then goes on for ever is nobody's body."""

    async def go_on() -> Door:
        async with _serving(_limited(body_timeout_s=0.2)) as served:
            reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
            writer.write(b"POST /nowhere HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
            ends = asyncio.create_task(reader.read())
            while not ends.done():
                writer.write(b"1000\r\n" + b"x" * 4096 + b"\r\n")
                await asyncio.wait({ends}, timeout=0.005)
            writer.close()
            with suppress(ConnectionError):
                await ends
            return served.door

    assert asyncio.run(asyncio.wait_for(go_on(), 30)).ended == {ConnectionEnd.BODY_TIMEOUT: 1}


@pytest.mark.parametrize(
    ("size", "keep"),
    [
        pytest.param(10_000_000, b"keep-alive", id="large"),
        pytest.param(10_000_000, b"close", id="large, and the last"),
        pytest.param(60_000, b"close", id="so small that the writer is not held up"),
    ],
)
def test_an_answer_that_nobody_reads_is_given_up(size: int, keep: bytes) -> None:
    async def stare() -> Door:
        async with _serving(_limited(body_timeout_s=0.1)) as served:
            with socket.socket() as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                client.connect(("127.0.0.1", served.port))
                head = b"GET /answer/%d HTTP/1.1\r\nHost: localhost\r\nConnection: %b\r\n\r\n"
                client.sendall(head % (size, keep))
                while not served.door.ended or served.door.open:
                    await asyncio.sleep(0.01)
            return served.door

    assert asyncio.run(asyncio.wait_for(stare(), 30)).ended == {ConnectionEnd.UNREAD: 1}


@pytest.mark.parametrize(
    "head",
    [
        pytest.param(b"X-Long: " + b"a" * 66_000 + b"\r\n\r\n", id="one header"),
        pytest.param(b"X-Many: 1234567890\r\n" * 5_000 + b"\r\n", id="many headers"),
    ],
)
def test_more_than_64_kib_of_headers_are_refused(head: bytes) -> None:
    answer = _ask(b"POST /echo HTTP/1.1\r\nHost: localhost\r\n", head)
    assert answer.startswith(b"HTTP/1.1 431 ")


def test_a_header_that_never_ends_is_cut_off() -> None:
    async def go_on() -> tuple[int, Door]:
        async with _serving(Settings()) as served:
            _, writer = await asyncio.open_connection("127.0.0.1", served.port)
            writer.write(b"POST /echo HTTP/1.1\r\nX-Long: ")
            sent = 0
            # Whoever still sends while the daemon closes may see a reset in place of the answer.
            with suppress(ConnectionError):
                while sent < 30_000_000:
                    writer.write(b"a" * 10_000)
                    await writer.drain()
                    sent += 10_000
            writer.close()
            return sent, served.door

    sent, door = asyncio.run(asyncio.wait_for(go_on(), 30))
    assert sent < 30_000_000
    assert door.ended == {ConnectionEnd.HEADER_TOO_LARGE: 1}


WAIT = b"GET /wait HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


def test_above_the_limit_of_connections_a_newcomer_is_refused_and_those_with_requests_are_served(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def crowd() -> tuple[bytes, bytes, Door]:
        async with _serving(_limited(max_connections=1)) as served:
            working = asyncio.create_task(_exchange(served.port, WAIT))
            await served.is_asked.wait()
            turned_away = await _exchange(served.port)
            assert await _exchange(served.port) == turned_away
            served.may_answer.set()
            return turned_away, await working, served.door

    turned_away, served, door = asyncio.run(asyncio.wait_for(crowd(), 30))
    assert turned_away.startswith(b"HTTP/1.1 503 ")
    assert served.startswith(b"HTTP/1.1 200 ")
    assert door.ended == {ConnectionEnd.TOO_MANY: 2}
    # Once, though it happened twice.
    assert _told(caplog) == [
        "each of the 1 connections that may be open has a request: a newcomer got 503 "
        "(--max-connections; at most half of the open files allowed); 1 so far"
    ]


def test_at_the_limit_the_idlest_gives_way_to_a_newcomer_and_then_the_oldest_half_header() -> None:
    async def crowd() -> tuple[list[bytes], Door]:
        async with _serving(_limited(max_connections=3)) as served:
            connections, answers = [], []
            for sent in (b"POST /echo HTTP/1.1\r\nHost: ", b"POST /echo HT", _post(b"")):
                connections.append(await asyncio.open_connection("127.0.0.1", served.port))
                connections[-1][1].write(sent)
            await connections[2][0].readuntil(b"}")
            # One that is idle after its answer, and two that have half a header: the idle one goes first.
            for _ in range(2):
                working = asyncio.create_task(_exchange(served.port, WAIT))
                await served.is_asked.wait()
                served.is_asked.clear()
                answers.append(working)
            left = [await connections[i][0].read() for i in (2, 0)]
            served.may_answer.set()
            return [*left, *[await each for each in answers]], served.door

    (idle, half, *others), door = asyncio.run(asyncio.wait_for(crowd(), 30))
    assert idle == b""
    assert half.startswith(b"HTTP/1.1 503 ")
    assert all(each.startswith(b"HTTP/1.1 200 ") for each in others)
    assert door.ended == {ConnectionEnd.MADE_ROOM: 2}


@contextmanager
def _descriptors_run_out(free: int) -> Iterator[None]:
    """So many of this process may still be opened before the door thinks of those that it spares."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free + free + 16, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_when_descriptors_run_out_it_is_told_and_counted_and_those_there_are_served(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def run_out() -> tuple[bytes, bytes, Door]:
        async with _serving(Settings()) as served:
            working = asyncio.create_task(_exchange(served.port, WAIT))
            await served.is_asked.wait()
            with _descriptors_run_out(free=1):  # for the client's end
                turned_away = await _exchange(served.port)
            served.may_answer.set()
            return turned_away, await working, served.door

    turned_away, served, door = asyncio.run(asyncio.wait_for(run_out(), 30))
    assert turned_away.startswith(b"HTTP/1.1 503 ")
    assert served.startswith(b"HTTP/1.1 200 ")
    assert door.ended == {ConnectionEnd.DESCRIPTORS: 1}
    assert "file descriptors run out (ulimit -n): a newcomer got 503; 1 so far" in _told(caplog)


def test_what_the_door_ended_is_in_the_metrics() -> None:
    async def ask() -> str:
        settings = Settings()
        app = create_app(settings)
        async with _serving(settings, app) as served:
            app.state.daemon.metrics.watch_connections(served.door)
            await _exchange(served.port, b"no HTTP\r\n\r\n")
            page = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
            return (await _exchange(served.port, page)).decode()

    page = asyncio.run(asyncio.wait_for(ask(), 30))
    assert 'dalsegno_connections_ended_total{reason="malformed"} 1.0' in page
    assert 'dalsegno_connections_ended_total{reason="descriptors"} 0.0' in page
    assert "dalsegno_connections_open 1.0" in page


def test_a_preflight_needs_no_key_and_a_refusal_can_be_read() -> None:
    origin = "https://chat.example"
    server = ServerSettings.model_validate({"cors_origins": (origin,), "api_keys": ("secret",)})
    settings = Settings(server=server)
    head = b" /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nOrigin: " + origin.encode() + b"\r\n"
    wish = b"Access-Control-Request-Method: GET\r\nAccess-Control-Request-Headers: authorization\r\n"
    preflight = _ask(b"OPTIONS" + head + wish + b"\r\n", settings=settings, app=create_app(settings))
    refusal = _ask(b"GET" + head + b"\r\n", settings=settings, app=create_app(settings))
    assert preflight.startswith(b"HTTP/1.1 200 ")
    assert refusal.startswith(b"HTTP/1.1 401 ")
    for answer in (preflight, refusal):
        assert b"access-control-allow-origin: " + origin.encode() in answer


def test_a_process_may_open_as_many_files_as_the_system_allows():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft // 2, hard))
        most = raise_descriptor_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
        assert most >= soft
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
