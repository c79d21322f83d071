"""HTTP/1.1 on one connection: uvicorn's protocol, which ignores what a client would rather speak."""

from __future__ import annotations

from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_HOP_TOKENS = (b"upgrade", b"http2-settings")


class DoorProtocol(HttpToolsProtocol):
    """A connection. An `Upgrade` is an offer, which a server may ignore (RFC 9110, 7.8): the request is answered
    in HTTP/1.1. The parser takes the offer for accepted and ends the message behind its headers, so such a request
    is held back there and parsed again without the offer, its body behind it."""

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            self.scope["method"] = self.parser.get_method().decode("ascii")
            self.scope["http_version"] = self.parser.get_http_version()
        else:
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            while data:
                data = self._feed(data)
        except httptools.HttpParserError:
            self._refuse("Invalid HTTP request received.")

    def _feed(self, data: bytes) -> bytes:
        """Parse up to the next offer, and the offering request's head without it. Gives what is left to parse."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            if self.scope["method"] == "CONNECT":
                self._refuse("This is no proxy: CONNECT is not spoken here.")
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

    def _refuse(self, message: str) -> None:
        self.logger.warning(message)
        self.send_400_response(message)


def _parser(protocol: HttpToolsProtocol) -> Any:
    """A fresh parser with the leniency that uvicorn gives its own."""
    parser = httptools.HttpRequestParser(protocol)
    parser.set_dangerous_leniencies(lenient_data_after_close=True)
    return parser
