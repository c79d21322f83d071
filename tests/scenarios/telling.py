"""Listening, in tests, to what a daemon says about itself: its insights as they change, and its event log."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.waiting import PATIENCE_SECONDS

_LOOK_AGAIN_SECONDS = 0.05
_WORDS = ("lighthouse", "keeper", "ship", "harbour", "counted", "every", "year", "rain", "stone", "letter", "window")

Body = dict[str, Any]


@dataclass
class Listener:
    """What `/insights/stream` has said so far, in another thread."""

    bodies: list[Body] = field(default_factory=list)
    _has_come: threading.Condition = field(default_factory=threading.Condition)

    def until(self, is_so: Callable[[Body], bool], *, after: int = 0) -> Body:
        """Waits for a body of which `is_so` holds, the first `after` of them left out."""

        def found() -> Body | None:
            return next((body for body in self.bodies[after:] if is_so(body)), None)

        with self._has_come:
            body = self._has_come.wait_for(found, PATIENCE_SECONDS)
        assert body is not None, f"never said; last of all came {self.bodies[-1:]}"
        return body

    def until_open(self, insight_id: str) -> Body:
        """The insight, once it is open."""
        return insight_of(self.until(lambda body: insight_id in ids_of(body)), insight_id)

    @property
    def reuse(self) -> set[str]:
        """Every state of reuse that was ever said."""
        return {body["reuse"] for body in self.bodies}

    @property
    def insights(self) -> set[str]:
        """Every insight that was ever open."""
        return {name for body in self.bodies for name in ids_of(body)}

    def read(self, lines: Iterator[str]) -> None:
        with contextlib.suppress(httpx.TransportError):  # the connection was closed
            for line in lines:
                if line.startswith("data: "):
                    with self._has_come:
                        self.bodies.append(json.loads(line.removeprefix("data: ")))
                        self._has_come.notify_all()


@contextlib.contextmanager
def listening(url: str, **headers: str) -> Iterator[Listener]:
    """Listens from the first body on, which has come, to the end."""
    listener = Listener()
    with (
        httpx.Client(base_url=url, timeout=httpx.Timeout(10.0, read=None)) as client,
        client.stream("GET", "/insights/stream", headers=headers) as answer,
    ):
        answer.raise_for_status()
        thread = threading.Thread(target=listener.read, args=(answer.iter_lines(),), daemon=True)
        thread.start()
        try:
            listener.until(lambda _body: True)
            yield listener
        finally:
            answer.extensions["network_stream"].get_extra_info("socket").shutdown(socket.SHUT_RDWR)
            thread.join(PATIENCE_SECONDS)


def ids_of(body: Body) -> list[str]:
    return [insight["id"] for insight in body["insights"]]


def insight_of(body: Body, insight_id: str) -> Body:
    [found] = [insight for insight in body["insights"] if insight["id"] == insight_id]
    return found


def logged(path: Path, kind: str | None = None) -> list[Body]:
    """The events of a log, of one kind or of all."""
    events = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [event for event in events if kind in (None, event["event"])]


def eventually(is_so: Callable[[], bool]) -> None:
    """For what nobody tells of when it comes."""
    end = time.monotonic() + PATIENCE_SECONDS
    while not is_so():
        assert time.monotonic() < end, "never came"
        time.sleep(_LOOK_AGAIN_SECONDS)


class Conversation:
    """Grows by a question and the answer to it with each turn. Mutable."""

    def __init__(self, name: str, *before: Body) -> None:
        self.messages: list[Body] = list(before)
        self._random = random.Random(name)

    def ask(self, client: httpx.Client, words: int = 12, **fields: Any) -> Body:
        """The next turn's answer."""
        self.messages.append({"role": "user", "content": self.words(words)})
        answer = chat(client, self.messages, **fields)
        self.messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
        return answer

    def words(self, count: int) -> str:
        return " ".join(self._random.choices(_WORDS, k=count))


def chat(client: httpx.Client, messages: Sequence[Body], **fields: Any) -> Body:
    body = {"messages": messages, "max_tokens": 2, "temperature": 0} | fields
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def pools_of(client: httpx.Client) -> Body:
    return client.get("/admin/cache").json()["pools"]


def until_judged(client: httpx.Client, **headers: str) -> None:
    """Until a sample was taken after everything that was answered so far: insights are judged before each."""
    now = client.get("/admin/history", headers=headers).json()["generated_unix_ms"]
    since = {"since": now}
    eventually(lambda: bool(client.get("/admin/history", params=since, headers=headers).json()["points"]))
