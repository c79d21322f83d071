"""One request's tokens to the text that its client gets: decoded, its thinking apart, up to the first stop string."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from engine.request import SamplingParams, Thinking, TokenLogprob
from engine.text.detokenizer import Detokenizer
from engine.text.reasoning import ReasoningSplitter, SplitText
from engine.text.stop_strings import StopStrings


class AnswerPiece(NamedTuple):
    """Text that is certain, the thinking before it, and the log probabilities of the tokens that begin in either."""

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    reasoning: str = ""


class AnswerText:
    """Mutable: one per request, for one caller at a time."""

    def __init__(self, detokenizer: Detokenizer, params: SamplingParams, thinking: Thinking = Thinking.IS_TEXT) -> None:
        self._detokenizer = detokenizer
        self._splitter = (
            None if thinking is Thinking.IS_TEXT else ReasoningSplitter(starts_inside=thinking is Thinking.IS_OPEN)
        )
        self.reasoning_tokens = 0
        """Those that were thinking, with their tags."""
        self._stops = StopStrings(params.stop, includes_stop=params.includes_stop) if params.stop else None
        self._tokens_before_stop = params.min_tokens
        self._tokens = 0
        self._characters = 0
        """Of the visible text."""
        self._pending: deque[tuple[int, TokenLogprob]] = deque()

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string was found; nothing comes after it."""
        return self._stops is not None and self._stops.is_found

    def push(self, token_id: int, logprob: TokenLogprob | None = None) -> AnswerPiece:
        """Take a token; returns what it makes certain, possibly nothing."""
        self._tokens += 1
        if logprob is not None:
            self._pending.append((self._characters, logprob))
        split = self._split(self._detokenizer.push(token_id))
        if self._splitter is not None and self._splitter.is_thinking:
            self.reasoning_tokens = self._tokens
        if self._stops is None or self._tokens <= self._tokens_before_stop:
            self._characters += len(split.content)
            return AnswerPiece(split.content, self._release(self._characters + 1), split.reasoning)
        return self._through_stops(split)

    def flush(self) -> AnswerPiece:
        """The answer has ended: what was held back."""
        split = self._split(self._detokenizer.flush())
        if self._splitter is not None:
            rest = self._splitter.finish()
            split = SplitText(split.reasoning + rest.reasoning, split.content + rest.content)
        if self._stops is None:
            return AnswerPiece(split.content, self._release(self._characters + 1), split.reasoning)
        piece = self._through_stops(split)
        logprobs = piece.logprobs + self._release(self._characters + 1)
        return AnswerPiece(piece.text + self._stops.flush(), logprobs, split.reasoning)

    def _split(self, text: str) -> SplitText:
        return SplitText("", text) if self._splitter is None else self._splitter.feed(text)

    def _through_stops(self, split: SplitText) -> AnswerPiece:
        assert self._stops is not None
        given_out = self._characters - self._stops.held_characters
        certain = self._stops.push(split.content)
        self._characters += len(split.content)
        given_out += len(certain)
        is_all = not self.is_stopped and given_out == self._characters
        released = self._release(given_out + is_all)
        if self.is_stopped:
            self._pending.clear()
        return AnswerPiece(certain, released, split.reasoning)

    def _release(self, end: int) -> tuple[TokenLogprob, ...]:
        """Those whose tokens begin before character `end`; in the thinking all are at character 0."""
        released: list[TokenLogprob] = []
        while self._pending and self._pending[0][0] < end:
            released.append(self._pending.popleft()[1])
        return tuple(released)
