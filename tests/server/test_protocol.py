"""One connection's HTTP: what a client offers, withholds or overdoes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
from fastapi import FastAPI, Request

from server.app import create_app
from server.listener import listen
from server.runner import _Server, http_config
from server.settings import ServerSettings, Settings

OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
BODY = b'{"text": "' + b"x" * 1000 + b'"}'


def _echo() -> FastAPI:
    app = FastAPI()

    @app.post("/echo")
    async def echo(request: Request) -> dict[str, int | str]:
        return {"bytes": len(await request.body()), "offer": request.headers.get("upgrade", "none")}

    return app


@asynccontextmanager
async def _serving(app: FastAPI, settings: Settings) -> AsyncIterator[int]:
    listener = listen("127.0.0.1", 0)
    server = _Server(http_config(app, settings))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield listener.getsockname()[1]
    finally:
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
        async with _serving(app or _echo(), settings or Settings()) as port:
            return await _exchange(port, *pieces)

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


def test_half_a_header_is_closed_by_the_deadline() -> None:
    answer = _ask(b"POST /echo HTTP/1.1\r\nHost: loc", settings=_limited(header_timeout_s=0.05))
    assert answer.startswith(b"HTTP/1.1 408 ")


def test_half_a_body_is_closed_by_the_deadline() -> None:
    answer = _ask(_post(b"")[:-5], settings=_limited(body_timeout_s=0.05))
    assert answer.startswith(b"HTTP/1.1 408 ")


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
    # Whoever still sends while the daemon closes may see a reset in place of the answer.
    with suppress(ConnectionError):
        assert _ask(b"POST /echo HTTP/1.1\r\nX-Long: ", b"a" * 600_000).startswith(b"HTTP/1.1 431 ")


def test_above_the_limit_of_connections_those_there_are_served() -> None:
    async def crowd() -> tuple[bytes, bytes]:
        async with _serving(_echo(), _limited(max_connections=1)) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(_post(b""))
            await reader.readuntil(b"}")
            turned_away = await _exchange(port)
            writer.write(LAST)
            return turned_away, await reader.read()

    turned_away, served = asyncio.run(asyncio.wait_for(crowd(), 30))
    assert turned_away.startswith(b"HTTP/1.1 503 ")
    assert served.startswith(b"HTTP/1.1 200 ")


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
