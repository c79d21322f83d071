"""Splits an answer into what the model thought (`<think>...</think>`) and what it says, piece by piece."""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple

OPEN_TAG = "<think>"
CLOSE_TAG = "</think>"
ANSWER_TAGS = frozenset({OPEN_TAG, CLOSE_TAG, "<tool_call>", "</tool_call>"})
"""What a model writes where a part of its answer begins or ends: text, also where a checkpoint marks it special."""


class SplitText(NamedTuple):
    """A piece of an answer; either part may be empty."""

    reasoning: str
    content: str


class _Part(Enum):
    START = auto()
    REASONING = auto()
    CONTENT = auto()


def opens_reasoning(prompt: str) -> bool:
    """Whether a rendered prompt leaves a think block open, so that the answer begins inside it."""
    return prompt.rstrip().endswith(OPEN_TAG)


class ReasoningSplitter:
    """Streaming splitter. Only a block at the very start of an answer counts; its tags and the blank space around them
    are dropped, so an empty block leaves nothing. Mutable: one per answer.
    """

    def __init__(self, *, starts_inside: bool = False) -> None:
        self._part = _Part.REASONING if starts_inside else _Part.START
        self._held = ""
        self._has_reasoning = False
        self._skips_blank = False
        self._is_thinking = False

    @property
    def is_thinking(self) -> bool:
        """Whether the last piece, or a part of it, was thinking."""
        return self._is_thinking

    def feed(self, text: str) -> SplitText:
        """Take the next piece of the answer; what could still turn out to be a tag or blank space is held back."""
        self._held += text
        reasoning = ""
        if self._part is _Part.START:
            self._leave_start()
        self._is_thinking = self._part is _Part.REASONING
        if self._is_thinking:
            reasoning = self._take_reasoning()
        return SplitText(reasoning, self._take_content() if self._part is _Part.CONTENT else "")

    def finish(self) -> SplitText:
        """The answer ended: what was held back, in the part where it was held."""
        held, self._held = self._held, ""
        if self._part is _Part.REASONING:
            return SplitText(held.rstrip() if self._has_reasoning else held.strip(), "")
        return SplitText("", held)

    def _leave_start(self) -> None:
        stripped = self._held.lstrip()
        if stripped.startswith(OPEN_TAG):
            self._part = _Part.REASONING
            self._held = stripped[len(OPEN_TAG) :]
        elif not OPEN_TAG.startswith(stripped):
            self._part = _Part.CONTENT

    def _take_reasoning(self) -> str:
        end = self._held.find(CLOSE_TAG)
        if end >= 0:
            taken = self._held[:end].rstrip()
            self._held = self._held[end + len(CLOSE_TAG) :]
            self._part = _Part.CONTENT
            self._skips_blank = True
        else:
            length = len(self._held) - _tag_prefix_length(self._held, CLOSE_TAG)
            length = len(self._held[:length].rstrip())
            taken, self._held = self._held[:length], self._held[length:]
        if not self._has_reasoning:
            taken = taken.lstrip()
            self._has_reasoning = bool(taken)
        return taken

    def _take_content(self) -> str:
        taken, self._held = self._held, ""
        if self._skips_blank:
            taken = taken.lstrip()
            self._skips_blank = not taken
        return taken


def _tag_prefix_length(text: str, tag: str) -> int:
    """Length of the longest end of `text` that is a beginning of `tag`."""
    return next((n for n in range(min(len(text), len(tag) - 1), 0, -1) if tag.startswith(text[-n:])), 0)
