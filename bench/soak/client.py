"""One request of a soak: streamed or not, read to its end or left in any phase."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import httpx

from bench.soak.sessions import CHAT, Ask


class Leave(StrEnum):
    """When a client goes away."""

    HALF_SENT = "half_sent"
    """Before its body is whole."""
    AT_ONCE = "at_once"
    """As soon as everything is sent."""
    LATER = "later"
    """After some time, wherever the request is by then."""
    READING = "reading"
    """After a few events of a stream."""


@dataclass(frozen=True, slots=True)
class Manner:
    """How a body is sent, and whether the client waits for the answer."""

    is_streamed: bool
    leave: Leave | None = None
    after_seconds: float = 0.0
    after_events: int = 0


@dataclass(slots=True)
class Reply:
    """What came back. Mutable while it comes."""

    request_id: str
    status: int = 0
    was_left: bool = False
    error: str = ""
    """The code of the daemon's error, or what is wrong with the answer."""
    text: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    reuse: dict[str, Any] = field(default_factory=dict)
    timings: dict[str, Any] = field(default_factory=dict)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    """Of each token, for chat completions that asked for them: token, logprob, top_logprobs."""

    @property
    def is_answered(self) -> bool:
        return self.status == 200 and not self.was_left and not self.error


class SoakClient:
    """Talks to one daemon. Close it with `close`."""

    def __init__(self, url: str, name: str, transport: httpx.AsyncBaseTransport | None = None) -> None:
        """`name` begins the ids of its requests; `transport` is another way to the daemon."""
        self._url = httpx.URL(url)
        self._name = name
        self._numbers = itertools.count()
        self._http = httpx.AsyncClient(
            base_url=url,
            timeout=httpx.Timeout(120),
            limits=httpx.Limits(max_connections=None),
            transport=transport,
            trust_env=False,
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def get(self, path: str) -> httpx.Response:
        return await self._http.get(path)

    async def post(self, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        return await self._http.post(path, json=body)

    async def ask(self, ask: Ask, manner: Manner) -> Reply:
        """Send one body. Raises httpx.HTTPError where the daemon does not answer at all."""
        reply = Reply(f"{self._name}-{next(self._numbers)}")
        body = {**ask.body, "stream": manner.is_streamed}
        if manner.is_streamed:
            body["stream_options"] = {"include_usage": True}
        if manner.leave in (Leave.HALF_SENT, Leave.AT_ONCE):
            reply.was_left = True
            await self._send_and_leave(ask.path, body, reply.request_id, is_whole=manner.leave is Leave.AT_ONCE)
            return reply
        try:
            async with asyncio.timeout(manner.after_seconds if manner.leave is Leave.LATER else None):
                await self._read(ask.path, body, manner, reply)
        except TimeoutError:
            reply.was_left = True
        return reply

    async def _read(self, path: str, body: dict[str, Any], manner: Manner, reply: Reply) -> None:
        headers = {"x-request-id": reply.request_id}
        async with self._http.stream("POST", path, json=body, headers=headers) as response:
            reply.status = response.status_code
            if response.is_error or not manner.is_streamed:
                _take_whole(path, json.loads(await response.aread()), reply)
                return
            await _take_stream(path, response.aiter_lines(), manner, reply)

    async def _send_and_leave(self, path: str, body: dict[str, Any], request_id: str, *, is_whole: bool) -> None:
        content = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nhost: {self._url.host}\r\ncontent-type: application/json\r\n"
            f"x-request-id: {request_id}\r\ncontent-length: {len(content)}\r\n\r\n"
        )
        _, writer = await asyncio.open_connection(self._url.host, self._url.port)
        try:
            writer.write(head.encode() + (content if is_whole else content[: len(content) // 2]))
            await writer.drain()
        finally:
            writer.close()


def _take_whole(path: str, answer: dict[str, Any], reply: Reply) -> None:
    if "error" in answer:
        reply.error = str(answer["error"].get("code") or answer["error"]["type"])
        return
    choice = answer["choices"][0]
    reply.text = (choice["message"]["content"] if path == CHAT else choice["text"]) or ""
    _take_logprobs(choice, reply)
    _take_cost(answer, reply)


async def _take_stream(path: str, lines: AsyncIterator[str], manner: Manner, reply: Reply) -> None:
    events = 0
    async for line in lines:
        if not line.startswith("data: "):
            continue
        if line == "data: [DONE]":
            break
        events += 1
        if manner.leave is Leave.READING and events > manner.after_events:
            reply.was_left = True
            return
        chunk = json.loads(line.removeprefix("data: "))
        if "error" in chunk:
            reply.error = str(chunk["error"].get("code") or chunk["error"]["type"])
            continue
        for choice in chunk["choices"]:
            reply.text += (choice["delta"].get("content") if path == CHAT else choice["text"]) or ""
            _take_logprobs(choice, reply)
        if chunk.get("usage"):
            _take_cost(chunk, reply)
    else:
        reply.error = "cut_off"
    if not reply.usage and not reply.error:
        reply.error = "without_usage"


def _take_logprobs(choice: dict[str, Any], reply: Reply) -> None:
    found = choice.get("logprobs") or {}
    reply.logprobs += found.get("content") or []


def _take_cost(answer: dict[str, Any], reply: Reply) -> None:
    reply.usage, reply.reuse, reply.timings = answer["usage"], answer["reuse"], answer["timings"]
