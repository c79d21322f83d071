"""What is done to the daemon: a body sent, or what no body can do: withhold, drip, leave, open a thousand sockets."""

from __future__ import annotations

import json
import resource
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial

from bench.hostile.bodies import CHAT, TOKENIZE, cases, digits

_PATIENCE_SECONDS = 120.0
_HALF_OPEN = 1100
_SPARE_DESCRIPTORS = 64
_DRIP_SECONDS = 0.05

Address = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Answer:
    """`status` is 0 where none came; `code` is the error's, empty where there is none."""

    status: int
    code: str = ""

    def __str__(self) -> str:
        return f"{self.status or 'none'} {self.code}".strip()


Deed = Callable[[Address], Answer]


@dataclass(frozen=True, slots=True)
class Act:
    """One thing to do, and the answer that is right."""

    name: str
    path: str
    prepare: Callable[[], Deed]
    """Makes what it needs beforehand, so that this work is not measured."""
    expected: Answer


def acts() -> Iterator[Act]:
    """All of them, in turn."""
    for case in cases():
        for path, code in case.codes.items():
            expected = Answer(400, code) if code else Answer(200)
            yield Act(case.name, path, partial(_body, path, case.body), expected)
    yield Act(f"{_HALF_OPEN:,} half headers beside a client", CHAT, lambda: _half_open, Answer(200))
    yield Act("a header without an end", CHAT, lambda: _endless_header, Answer(0))
    yield Act("a body that drips", CHAT, lambda: _drip, Answer(408))
    yield Act("leaves in the middle of its work", TOKENIZE, lambda: _leave, Answer(0))


def _body(path: str, body: Callable[[], bytes]) -> Deed:
    return partial(_post, path=path, body=body())


def _post(address: Address, path: str, body: bytes) -> Answer:
    with socket.create_connection(address, _PATIENCE_SECONDS) as connection:
        # Refused while it is still sent, the rest of a body finds a closed door; the answer may be there nevertheless.
        with suppress(ConnectionError):
            connection.sendall(_head(path, len(body)))
            connection.sendall(body)
        return _read(connection)


def _head(path: str, length: int) -> bytes:
    lines = (f"POST {path} HTTP/1.1", "host: localhost", "content-type: application/json", "connection: close")
    return ("\r\n".join(lines) + f"\r\ncontent-length: {length}\r\n\r\n").encode()


def _read(connection: socket.socket) -> Answer:
    """Read to the end; a large answer is thrown away as it comes, all but its beginning."""
    kept = b""
    with suppress(ConnectionError, TimeoutError):
        while piece := connection.recv(1 << 16):
            kept = kept or piece if len(kept) > 1 << 12 else kept + piece
    head, _, body = kept.partition(b"\r\n\r\n")
    status = int(head.split(b" ", 2)[1]) if head.startswith(b"HTTP/1.1 ") else 0
    if status < 400:
        return Answer(status)
    try:
        return Answer(status, json.loads(body)["error"]["code"] or "")
    except (ValueError, KeyError, TypeError):
        return Answer(status)


def _half_open(address: Address) -> Answer:
    """The answer that a client gets beside them."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    count = _HALF_OPEN if hard == resource.RLIM_INFINITY else min(_HALF_OPEN, hard - _SPARE_DESCRIPTORS)
    with ExitStack() as stack:
        for _ in range(count):
            connection = stack.enter_context(socket.create_connection(address, _PATIENCE_SECONDS))
            connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: ")
        body = b'{"max_tokens":1,"messages":[{"role":"user","content":"hi"}]}'
        return _post(address, CHAT, body)


def _endless_header(address: Address) -> Answer:
    """It is cut off: whoever still sends sees a reset, or the answer."""
    with socket.create_connection(address, _PATIENCE_SECONDS) as connection:
        connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nx-long: ")
        try:
            for _ in range(480):
                connection.sendall(b"a" * (1 << 16))
        except ConnectionError:
            return Answer(0)
        return _read(connection)


def _drip(address: Address) -> Answer:
    with socket.create_connection(address, _DRIP_SECONDS) as connection:
        connection.sendall(_head(CHAT, 1_000_000))
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while time.monotonic() < deadline:
            try:
                if connection.recv(1, socket.MSG_PEEK):
                    return _read(connection)
            except TimeoutError:
                connection.sendall(b" ")
    return Answer(0)


def _leave(address: Address) -> Answer:
    body = digits(1_000_000)
    with socket.create_connection(address, _PATIENCE_SECONDS) as connection:
        connection.sendall(_head(TOKENIZE, len(body)) + body)
    return Answer(0)
