"""HTTP/1.1 on one connection: uvicorn's protocol, with an end to what a client may withhold or overdo."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import Any

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_HOP_TOKENS = (b"upgrade", b"http2-settings")


MAX_HEADER_BYTES = 64 * 1024
"""Of a request's line and headers together; its trailers count too."""

_TELL_AGAIN_S = 60

logger = logging.getLogger("dalsegno.http")


@dataclass(slots=True)
class DoorLimits:
    """What all connections keep to, and how many were turned away."""

    max_connections: int
    header_timeout_s: float
    body_timeout_s: float
    refused: int = 0
    _told: float = float("-inf")

    def refuse(self) -> None:
        """Count a connection that is turned away; the log says so once a minute at most."""
        self.refused += 1
        if time.monotonic() - self._told >= _TELL_AGAIN_S:
            self._told = time.monotonic()
            logger.warning(
                "%d connections are open, which is the limit: new ones get 503, %d so far "
                "(--max-connections, and the limit of open files)",
                self.max_connections,
                self.refused,
            )


class DoorConfig(uvicorn.Config):
    """uvicorn's configuration with our limits."""

    def __init__(self, app: Any, limits: DoorLimits, **others: Any) -> None:
        super().__init__(app, http=DoorProtocol, **others)
        self.limits = limits


class DoorProtocol(HttpToolsProtocol):
    """A connection. A head has one deadline, a body one for each silence.

    An `Upgrade` is an offer, which a server may ignore (RFC 9110, 7.8): the request is answered in HTTP/1.1. The
    parser takes the offer for accepted and ends the message behind its headers, so such a request is held back there
    and parsed again without the offer, its body behind it."""

    config: DoorConfig

    _deadline: asyncio.TimerHandle | None = None
    _in_body = False
    _progress = False
    _quiet_bytes = 0
    _header_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        limits = self.config.limits
        if len(self.connections) > limits.max_connections:
            limits.refuse()
            self._refuse(b"503 Service Unavailable", "Too many connections are open.")
            return
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        self._unset_deadline()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._progress = True
        self._in_body = False
        self._header_bytes = 0
        if self._deadline is None:
            self._set_deadline(self.config.limits.header_timeout_s)

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._progress = True
        if self.parser.should_upgrade():
            self.scope["method"] = self.parser.get_method().decode("ascii")
            self.scope["http_version"] = self.parser.get_http_version()
            return
        self._in_body = True
        self._set_deadline(self.config.limits.body_timeout_s)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._progress = True
        self._set_deadline(self.config.limits.body_timeout_s)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            self._progress = True
            self._in_body = False
            self._unset_deadline()
            super().on_message_complete()

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        if self.transport.is_closing():
            return
        if self._deadline is None:
            self._set_deadline(self.config.limits.header_timeout_s)
        self._progress = False
        received = len(data)
        try:
            while data:
                data = self._feed(data)
        except httptools.HttpParserError:
            if self._header_bytes <= MAX_HEADER_BYTES:
                self._refuse(b"400 Bad Request", "Invalid HTTP request received.")
                return
        self._quiet_bytes = 0 if self._progress else self._quiet_bytes + received
        if max(self._quiet_bytes, self._header_bytes) > MAX_HEADER_BYTES:
            self._refuse(b"431 Request Header Fields Too Large", "The headers are larger than 64 KiB.")

    def _count(self, header_bytes: int) -> None:
        self._header_bytes += header_bytes
        if self._header_bytes > MAX_HEADER_BYTES:
            raise ValueError("the headers are too large")

    def _set_deadline(self, seconds: float) -> None:
        self._unset_deadline()
        self._deadline = self.loop.call_later(seconds, self._deadline_passed, seconds)

    def _unset_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _deadline_passed(self, seconds: float) -> None:
        """Close, unless it is us who do not read, or an answer to an earlier request still runs."""
        answering = self.cycle is not None and not self.cycle.response_complete
        if self.flow.read_paused or (answering and not self._in_body):
            self._set_deadline(seconds)
        else:
            self._refuse(b"408 Request Timeout", "The request did not arrive in time.")

    def _feed(self, data: bytes) -> bytes:
        """Parse up to the next offer, and the offering request's head without it. Gives what is left to parse."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            if self.scope["method"] == "CONNECT":
                self._refuse(b"400 Bad Request", "This is no proxy: CONNECT is not spoken here.")
                return b""
            head = self._head_without_offer()
            self.parser = _parser(self)
            self.parser.feed_data(head)
            return data[offer.args[0] :]
        return b""

    def _head_without_offer(self) -> bytes:
        lines = [b"%s %s HTTP/%s" % (self.scope["method"].encode(), self.url, self.scope["http_version"].encode())]
        for name, value in self.headers:
            if name == b"connection":
                value = b", ".join(
                    token.strip() for token in value.split(b",") if token.strip().lower() not in _HOP_TOKENS
                )
            if name not in _HOP_TOKENS:
                lines.append(name + b": " + value)
        return b"\r\n".join([*lines, b"", b""])

    def _refuse(self, status: bytes, message: str) -> None:
        """Answer and close; only close where an answer has begun."""
        self._unset_deadline()
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            head = b"HTTP/1.1 %s\r\ncontent-type: text/plain; charset=utf-8\r\ncontent-length: %d\r\n"
            self.transport.write(head % (status, len(message)) + b"connection: close\r\n\r\n" + message.encode())
        self.transport.close()


def _parser(protocol: HttpToolsProtocol) -> Any:
    """A fresh parser with the leniency that uvicorn gives its own."""
    parser = httptools.HttpRequestParser(protocol)
    parser.set_dangerous_leniencies(lenient_data_after_close=True)
    return parser
