"""The consumer's end of one request: an asynchronous iterator of deltas that cancels the request when it is left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from types import TracebackType
from typing import Self

from engine.errors import RequestError
from engine.request import Delta, TokenLogprob


class Mailbox:
    """What the loop has produced for one request and its consumer has not yet taken. Touched by the event loop only.

    Deltas that are not taken in time merge into one, so that it never holds more than the request's tokens.
    """

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._end: Delta | RequestError | None = None
        self._is_filled = asyncio.Event()

    def put(self, text: str, token_id: int, logprobs: tuple[TokenLogprob, ...] = (), reasoning: str = "") -> None:
        """Add one token, the text that it completed, the log probabilities of the tokens in that text, and what was
        thought before it."""
        self._texts.append(text)
        self._reasoning.append(reasoning)
        self._token_ids.append(token_id)
        self._logprobs.extend(logprobs)
        self._is_filled.set()

    def finish(self, end: Delta) -> None:
        """End the stream; texts and log probabilities of `end` are what was held back, and it has no tokens."""
        self._end = end
        self._is_filled.set()

    def fail(self, error: RequestError) -> None:
        """End the stream with an error, after what is already in it."""
        self._end = error
        self._is_filled.set()

    async def take(self) -> Delta:
        """Everything since the last call, at least one token or the end. Raises the RequestError of a failed stream."""
        await self._is_filled.wait()
        self._is_filled.clear()
        text, token_ids = "".join(self._texts), tuple(self._token_ids)
        logprobs, reasoning = tuple(self._logprobs), "".join(self._reasoning)
        self._texts.clear()
        self._reasoning.clear()
        self._token_ids.clear()
        self._logprobs.clear()
        end = self._end
        if isinstance(end, Delta):
            return replace(
                end,
                text=text + end.text,
                token_ids=token_ids,
                logprobs=logprobs + end.logprobs,
                reasoning=reasoning + end.reasoning,
            )
        if end is not None:
            if not token_ids:
                raise end
            self._is_filled.set()
        return Delta(text, token_ids, logprobs=logprobs, reasoning=reasoning)


class Generation(AsyncIterator[Delta]):
    """One request's answer. Iterate it to the end, or leave it with `aclose` (or `async with`): that cancels it.

    A handle that is dropped, or whose consumer task is cancelled, cancels the request too.
    """

    def __init__(self, request_id: str, mailbox: Mailbox, cancel: Callable[[], None]) -> None:
        self.request_id = request_id
        self._mailbox = mailbox
        self._cancel = cancel
        self._is_over = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        """The next piece; the last one has a `finish_reason`. Raises RequestError when the request fails midway."""
        if self._is_over:
            raise StopAsyncIteration
        try:
            delta = await self._mailbox.take()
        except BaseException as error:
            if isinstance(error, RequestError):
                self._is_over = True
            else:
                self.abandon()
            raise
        self._is_over = delta.finish_reason is not None
        return delta

    def abandon(self) -> None:
        """Leave the stream; cancels the request unless it has ended. Safe to call more than once."""
        if not self._is_over:
            self._is_over = True
            self._cancel()

    async def aclose(self) -> None:
        """`abandon`, as asynchronous iterators name it."""
        self.abandon()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abandon()

    def __del__(self) -> None:
        self.abandon()
