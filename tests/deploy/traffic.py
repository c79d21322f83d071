"""Conversations of several turns that go on in the background for as long as a test needs them."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from tests.waiting import PATIENCE_SECONDS

TURNS = 6
_WORDS = "the red house by the river had a door that nobody opened in winter but the cat went in and out"


@contextmanager
def conversations(url: str, at_once: int = 2) -> Iterator[None]:
    """Each goes on for some turns, or until the daemon fails on it, then another begins. None may be refused."""
    is_over = threading.Event()
    numbers = itertools.count()
    errors: list[httpx.HTTPError] = []

    def talk() -> None:
        try:
            with httpx.Client(base_url=url, timeout=PATIENCE_SECONDS) as client:
                while not is_over.is_set():
                    converse(client, next(numbers), is_over)
        except httpx.HTTPError as error:
            errors.append(error)

    threads = [threading.Thread(target=talk) for _ in range(at_once)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    assert errors == []


def converse(client: httpx.Client, number: int, is_over: threading.Event) -> None:
    messages = [{"role": "system", "content": f"You know {number} stories. {_WORDS}."}]
    for turn in range(TURNS):
        if is_over.is_set():
            return
        messages.append({"role": "user", "content": f"Tell number {turn} of {number}: {_WORDS}."})
        body = {"messages": messages, "max_tokens": 4, "temperature": 0}
        answer = client.post("/v1/chat/completions", json=body)
        if answer.status_code >= 500:
            return
        content = answer.raise_for_status().json()["choices"][0]["message"]["content"]
        messages.append({"role": "assistant", "content": content or "..."})
