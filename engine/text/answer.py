"""One request's tokens to the text that its client gets: decoded, up to the first stop string."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from engine.request import SamplingParams, TokenLogprob
from engine.text.detokenizer import Detokenizer
from engine.text.stop_strings import StopStrings


class AnswerPiece(NamedTuple):
    """Text that is certain, and the log probabilities of the tokens that begin in it."""

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


class AnswerText:
    """Mutable: one per request, for one caller at a time."""

    def __init__(self, detokenizer: Detokenizer, params: SamplingParams) -> None:
        self._detokenizer = detokenizer
        self._stops = StopStrings(params.stop, includes_stop=params.includes_stop) if params.stop else None
        self._tokens_before_stop = params.min_tokens
        self._tokens = 0
        self._characters = 0
        self._pending: deque[tuple[int, TokenLogprob]] = deque()

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string was found; nothing comes after it."""
        return self._stops is not None and self._stops.is_found

    def push(self, token_id: int, logprob: TokenLogprob | None = None) -> AnswerPiece:
        """Take a token; returns what it makes certain, possibly nothing."""
        self._tokens += 1
        text = self._detokenizer.push(token_id)
        if logprob is not None:
            self._pending.append((self._characters, logprob))
        if self._stops is None or self._tokens <= self._tokens_before_stop:
            self._characters += len(text)
            return AnswerPiece(text, self._release(self._characters + 1))
        return self._through_stops(text)

    def flush(self) -> AnswerPiece:
        """The answer has ended: what was held back."""
        text = self._detokenizer.flush()
        if self._stops is None:
            return AnswerPiece(text, self._release(self._characters + 1))
        piece = self._through_stops(text)
        return AnswerPiece(piece.text + self._stops.flush(), piece.logprobs + self._release(self._characters + 1))

    def _through_stops(self, text: str) -> AnswerPiece:
        assert self._stops is not None
        given_out = self._characters - self._stops.held_characters
        certain = self._stops.push(text)
        self._characters += len(text)
        given_out += len(certain)
        is_all = not self.is_stopped and given_out == self._characters
        released = self._release(given_out + is_all)
        if self.is_stopped:
            self._pending.clear()
        return AnswerPiece(certain, released)

    def _release(self, end: int) -> tuple[TokenLogprob, ...]:
        """Those whose tokens begin before character `end`."""
        released: list[TokenLogprob] = []
        while self._pending and self._pending[0][0] < end:
            released.append(self._pending.popleft()[1])
        return tuple(released)
