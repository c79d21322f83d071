"""Text to token ids, in slices, and no further than the context reaches."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping

import tokenizers

from engine.errors import ContextLengthExceededError, RequestError
from engine.text.slices import LONG, Slices

_SLICE_CHARACTERS = 32768
_LONG_CHARACTERS = 4 * _SLICE_CHARACTERS
"""A part of this length takes a second and more where it is one word."""
_CHARACTERS_PER_TOKEN = 4
"""Of usual text; more of it than this many times the context is first looked at in part."""
_UNSURE_WORDS = 32
"""At a cut, a special token that lies across it may still change so many words before it."""
_LONGEST_LOOK_BACK = 4096
_NORMALISED_SHRINKS = 4
"""Canonical composition joins at most three characters (Unicode, annex 15); one for good measure."""


class Encoded:
    """A text's tokens, and where in the text they begin. Mutable while it is being encoded."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self._starts: list[int] = []
        self._parts: list[tuple[int, tokenizers.Encoding]] = []

    def add(self, start: int, encoding: tokenizers.Encoding, token_ids: Iterable[int]) -> None:
        """The part of the text that begins with character `start`."""
        self._starts.append(start)
        self._parts.append((len(self.token_ids), encoding))
        self.token_ids += token_ids

    def tokens_before(self, place: int) -> int | None:
        """How many tokens lie before a place in the text, in characters, before its end; None inside a token."""
        part = bisect_right(self._starts, place) - 1
        tokens, encoding = self._parts[part]
        index = encoding.char_to_token(place - self._starts[part])
        span = None if index is None else encoding.token_to_chars(index)
        return tokens + index if index is not None and span and span[0] + self._starts[part] == place else None


class TextEncoder:
    """A tokenizer of Hugging Face's library, asked for one text at a time. Immutable, so any thread may use it.

    The library is called in the one way that lets other threads run meanwhile (`encode_batch`).
    """

    def __init__(
        self,
        library: tokenizers.Tokenizer,
        longest_token_bytes: int,
        cuts: Iterable[str] = (),
        ids: Mapping[int, int] | None = None,
    ) -> None:
        """`cuts`: characters that are tokens by themselves, before which a text may be cut. `ids`: what some of the
        library's ids are to be."""
        self._library = library
        self._longest_token_bytes = longest_token_bytes
        characters = "".join(cuts)
        self._cut = re.compile(f"[{re.escape(characters)}]") if characters else None
        self._ids = dict(ids or {})

    def encode(self, text: str, *, add_special_tokens: bool = False, max_tokens: int | None = None) -> Slices[Encoded]:
        """Raises RequestError for text that is not valid Unicode, ContextLengthExceededError as soon as it is sure that
        the text has no fewer than `max_tokens`."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"text has a lone surrogate at character {error.start}; send valid Unicode") from error
        encoded = Encoded()
        for start, part in [(0, text)] if add_special_tokens else self._parts(text):
            if max_tokens is not None:
                yield from self._refuse_overlong(part, len(encoded.token_ids), max_tokens)
            if start or len(part) > _SLICE_CHARACTERS:
                yield _pace(part)
            encoding = self._library.encode_batch([part], add_special_tokens=add_special_tokens)[0]
            encoded.add(start, encoding, [self._ids.get(i, i) for i in encoding.ids] if self._ids else encoding.ids)
            if start + len(part) < len(text):
                _refuse_from(len(encoded.token_ids), max_tokens)
        return encoded

    def refuse_endless(self, characters: int, max_tokens: int) -> None:
        """Raises ContextLengthExceededError for a length that no encoding makes shorter than `max_tokens`;
        to be asked before any work."""
        _refuse_from(characters // (_NORMALISED_SHRINKS * self._longest_token_bytes), max_tokens)

    def _parts(self, text: str) -> Iterator[tuple[int, str]]:
        start = 0
        while self._cut is not None:
            cut = self._cut.search(text, start + _SLICE_CHARACTERS)
            if cut is None:
                break
            yield start, text[start : cut.start()]
            start = cut.start()
        yield start, text[start:]

    def _refuse_overlong(self, text: str, tokens_before: int, max_tokens: int) -> Slices[None]:
        """By ever longer beginnings of a text that hardly fits, so that one that does not costs little more than what
        would have fitted."""
        length = max(_CHARACTERS_PER_TOKEN * (max_tokens - tokens_before), _SLICE_CHARACTERS)
        while length <= len(text) // 2:
            beginning = text[:length]
            yield _pace(beginning)
            encoding = self._library.encode_batch([beginning], add_special_tokens=False)[0]
            # What follows can change how the end of a word is cut, and by that the word; it never halves its tokens.
            _refuse_from(tokens_before + max(_sure_tokens(encoding), len(encoding) // 2), max_tokens)
            length *= 2


def _pace(text: str) -> bool:
    return LONG if len(text) > _LONG_CHARACTERS else not LONG


def _sure_tokens(encoding: tokenizers.Encoding) -> int:
    """Tokens of a beginning that are also those of the whole text: all but those of its last words."""
    index, words, word = len(encoding), 0, None
    earliest = max(0, index - _LONGEST_LOOK_BACK)
    while index > earliest:
        now = encoding.token_to_word(index - 1)
        if now is None or now != word:
            words, word = words + 1, now
        if words > _UNSURE_WORDS:
            return index
        index -= 1
    return 0


def _refuse_from(tokens: int, max_tokens: int | None) -> None:
    if max_tokens is not None and tokens >= max_tokens:
        raise ContextLengthExceededError(max_tokens, f"your prompt has at least {tokens} tokens", param="prompt")
