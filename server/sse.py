"""Server-sent events: how a stream is written, kept alive, and ended when its reader leaves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.leaving import until_disconnect
from server.responses import to_json

logger = logging.getLogger("dalsegno.http")

KEEP_ALIVE_SECONDS = 15.0
STALL_LIMIT_SECONDS = 60.0
"""How long a reader may take nothing while there is something for it; then it counts as gone."""
DONE = b"data: [DONE]\n\n"
COMMENT = b": keep-alive\n\n"


def event(content: Any, name: str = "") -> bytes:
    """One event with JSON data, and a name where its reader tells several apart."""
    return (f"event: {name}\n".encode() if name else b"") + b"data: " + to_json(content) + b"\n\n"


class EventStream(Response):
    """Streams `events` with a comment after each silence; closes them when they end or the reader leaves.

    Raises ClientDisconnect when the reader left before the end, or stopped reading.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        keep_alive_seconds: float = KEEP_ALIVE_SECONDS,
        stall_limit_seconds: float = STALL_LIMIT_SECONDS,
    ) -> None:
        self._events = events
        self._stall_limit_seconds = stall_limit_seconds
        self._keep_alive_seconds = keep_alive_seconds
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        writer = _Writer(send, self._stall_limit_seconds)
        pump = asyncio.create_task(self._pump(writer))
        helpers = [asyncio.create_task(writer.comment_on_silence(self._keep_alive_seconds))]
        helpers.append(asyncio.create_task(until_disconnect(receive)))
        try:
            await asyncio.wait([pump, *helpers], return_when=asyncio.FIRST_COMPLETED)
            is_whole = pump.done()
        finally:
            for task in (pump, *helpers):
                task.cancel()
            await asyncio.gather(pump, *helpers, return_exceptions=True)
            await self._events.aclose()
        if not is_whole:
            raise ClientDisconnect
        pump.result()

    async def _pump(self, writer: _Writer) -> None:
        async for chunk in self._events:
            await writer.write(chunk)
        await writer.write(b"", is_last=True)


class _Writer:
    """Serialises what two tasks send on one response."""

    def __init__(self, send: Send, stall_limit_seconds: float) -> None:
        self._send = send
        self._stall_limit_seconds = stall_limit_seconds
        self._lock = asyncio.Lock()
        self._wrote = asyncio.Event()

    async def write(self, chunk: bytes, *, is_last: bool = False) -> None:
        """Raises ClientDisconnect when the reader takes nothing for too long: the server waits while its buffer is
        full."""
        async with self._lock:
            try:
                async with asyncio.timeout(self._stall_limit_seconds):
                    await self._send({"type": "http.response.body", "body": chunk, "more_body": not is_last})
            except TimeoutError:
                logger.warning("a reader took nothing for %g seconds; its request ends", self._stall_limit_seconds)
                raise ClientDisconnect from None
        self._wrote.set()

    async def comment_on_silence(self, seconds: float) -> None:
        while True:
            self._wrote.clear()
            try:
                async with asyncio.timeout(seconds):
                    await self._wrote.wait()
            except TimeoutError:
                await self.write(COMMENT)
