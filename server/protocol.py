"""HTTP/1.1 on one connection: uvicorn's protocol, with an end to what a client may withhold or overdo."""

from __future__ import annotations

import asyncio
from typing import Any

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ops.connections import ConnectionEnd
from server.door import Door

_HOP_TOKENS = (b"upgrade", b"http2-settings")


MAX_HEADER_BYTES = 64 * 1024
"""Of a request's line and headers together; its trailers count too."""

_MIN_BYTES_PER_S = 4096
"""Of a body that comes, and of an answer that is taken, beside the first `body_timeout_s`: less is a drip."""


_CROWDED = (b"503 Service Unavailable", b"Too many connections are open.")
_LATE = (b"408 Request Timeout", b"The request did not arrive in time.")

_ANSWERS = {
    ConnectionEnd.TOO_MANY: _CROWDED,
    ConnectionEnd.DESCRIPTORS: _CROWDED,
    ConnectionEnd.MADE_ROOM: _CROWDED,
    ConnectionEnd.HEADER_TIMEOUT: _LATE,
    ConnectionEnd.BODY_TIMEOUT: _LATE,
    ConnectionEnd.HEADER_TOO_LARGE: (b"431 Request Header Fields Too Large", b"The headers are larger than 64 KiB."),
    ConnectionEnd.MALFORMED: (b"400 Bad Request", b"This is no request in HTTP/1.1, or one that only a proxy takes."),
}


class DoorConfig(uvicorn.Config):
    """uvicorn's configuration with our door."""

    def __init__(self, app: Any, door: Door, **others: Any) -> None:
        super().__init__(app, http=DoorProtocol, **others)
        self.door = door


class DoorProtocol(HttpToolsProtocol):
    """A connection. A head has one deadline; a body one for each silence, and one that grows with what has come; an
    answer one for each time that its client does not read.

    An `Upgrade` is an offer, which a server may ignore (RFC 9110, 7.8): the request is answered in HTTP/1.1. The
    parser takes the offer for accepted and ends the message behind its headers, so such a request is held back there
    and parsed again without the offer, its body behind it."""

    config: DoorConfig

    _deadline: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None
    _in_body = False
    _body_until = 0.0
    _progress = False
    _quiet_bytes = 0
    _header_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._door = self.config.door
        self._door.open += 1
        refusal = self._door.refusal(transport.get_extra_info("socket").fileno())
        if refusal is not None:
            self._refuse(refusal)
            return
        self._door.waits(self, in_head=False)
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        self._door.open -= 1
        self._door.works(self)
        self._unset_deadline()
        self._unset_unread()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def make_room(self) -> None:
        """Close it for a newcomer; who has begun a request is told."""
        if self._deadline is None:
            self._door.note(ConnectionEnd.MADE_ROOM)
            self._close()
        else:
            self._refuse(ConnectionEnd.MADE_ROOM)

    def timeout_keep_alive_handler(self) -> None:
        self._close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._set_unread()

    def resume_writing(self) -> None:
        if not self.transport.is_closing():
            self._unset_unread()
        super().resume_writing()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._progress = True
        self._in_body = False
        self._header_bytes = 0
        if self._deadline is None:
            self._set_deadline(self._door.header_timeout_s)

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
        self._begin_body()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._progress = True
        if self.cycle is None or not self.cycle.response_complete:
            # What follows an answer is thrown away, and has the time that is left.
            self._body_until += len(body) / _MIN_BYTES_PER_S
            self._set_deadline(min(self._door.body_timeout_s, self._body_until - self.loop.time()))
        super().on_body(body)

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            self._progress = True
            self._in_body = False
            self._unset_deadline()
            super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._close()
        elif self._in_body and not self.cycle.response_complete:
            self._begin_body()  # of a request that was not read while this answer ran
        self._place()

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        if self.transport.is_closing():
            return
        if self._deadline is None:
            self._set_deadline(self._door.header_timeout_s)
        self._progress = False
        received = len(data)
        try:
            while data:
                data = self._feed(data)
        except httptools.HttpParserError:
            if self._header_bytes <= MAX_HEADER_BYTES:
                self._refuse(ConnectionEnd.MALFORMED)
                return
        self._quiet_bytes = 0 if self._progress else self._quiet_bytes + received
        if max(self._quiet_bytes, self._header_bytes) > MAX_HEADER_BYTES:
            self._refuse(ConnectionEnd.HEADER_TOO_LARGE)
        self._place()

    def _count(self, header_bytes: int) -> None:
        self._header_bytes += header_bytes
        if self._header_bytes > MAX_HEADER_BYTES:
            raise ValueError("the headers are too large")

    def _place(self) -> None:
        """Tell the door whether there is a request here."""
        answering = self.cycle is not None and not self.cycle.response_complete
        if answering or self._in_body or self.transport.is_closing():
            self._door.works(self)
        else:
            self._door.waits(self, in_head=self._deadline is not None)

    def _begin_body(self) -> None:
        self._body_until = self.loop.time() + self._door.body_timeout_s
        self._set_deadline(self._door.body_timeout_s)

    def _set_deadline(self, seconds: float) -> None:
        self._unset_deadline()
        self._deadline = self.loop.call_later(seconds, self._deadline_passed)

    def _unset_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _deadline_passed(self) -> None:
        """Close, unless it is us who do not read, or an answer to an earlier request still runs."""
        answering = self.cycle is not None and not self.cycle.response_complete
        if self._in_body:
            if self.flow.read_paused:
                self._begin_body()
            else:
                self._refuse(ConnectionEnd.BODY_TIMEOUT)
        elif self.flow.read_paused or answering:
            self._set_deadline(self._door.header_timeout_s)
        else:
            self._refuse(ConnectionEnd.HEADER_TIMEOUT)

    def _set_unread(self) -> None:
        self._unset_unread()
        seconds, size = self._door.body_timeout_s, self.transport.get_write_buffer_size()
        self._unread = self.loop.call_later(seconds, self._unread_for_long, size - int(seconds * _MIN_BYTES_PER_S))

    def _unset_unread(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _unread_for_long(self, most_left_bytes: int) -> None:
        """Nothing is written meanwhile, so what is left says how much was taken."""
        if self.transport.get_write_buffer_size() <= most_left_bytes:
            self._set_unread()
        else:
            self._door.note(ConnectionEnd.UNREAD)
            self.transport.abort()

    def _feed(self, data: bytes) -> bytes:
        """Parse up to the next offer, and the offering request's head without it. Gives what is left to parse."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            if self.scope["method"] == "CONNECT":
                self._refuse(ConnectionEnd.MALFORMED)
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

    def _refuse(self, reason: ConnectionEnd) -> None:
        """Answer and close; only close where an answer has begun."""
        if self.transport.is_closing():
            return
        self._door.note(reason)
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            status, message = _ANSWERS[reason]
            head = b"HTTP/1.1 %s\r\ncontent-type: text/plain; charset=utf-8\r\ncontent-length: %d\r\n"
            self.transport.write(head % (status, len(message)) + b"connection: close\r\n\r\n" + message)
        self._close()

    def _close(self) -> None:
        """Close once what was written has left, which its reader may not put off for ever."""
        self._unset_deadline()
        self._door.works(self)
        self.transport.close()
        self._set_unread()


def _parser(protocol: HttpToolsProtocol) -> Any:
    """A fresh parser with the leniency that uvicorn gives its own."""
    parser = httptools.HttpRequestParser(protocol)
    parser.set_dangerous_leniencies(lenient_data_after_close=True)
    return parser
