"""Text to token ids and back, by the checkpoint's own tokenizer.json."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers

from engine.errors import ContextLengthExceededError, ModelLoadError, RequestError
from engine.text.detokenizer import Detokenizer, TokenBytes

_NORMALISED_SHRINKS = 4
"""Canonical composition joins at most three characters (Unicode, annex 15); one for good measure."""


class Tokenizer:
    """A Hugging Face tokenizer. Immutable, so any thread may use it."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, special_tokens: dict[str, str]) -> None:
        self._tokenizer = tokenizer
        self.special_tokens = special_tokens
        """Named special tokens of the checkpoint, e.g. {"eos_token": "<|im_end|>"}."""
        self.vocab_size: int = tokenizer.get_vocab_size(with_added_tokens=True)
        self.special_token_ids: frozenset[int] = frozenset(
            token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special
        )
        self._token_bytes = TokenBytes(self.token_of, _decoder_of(tokenizer))
        self._max_tokens: int | None = None
        self._longest_token_bytes = max((len(token.encode()) for token in tokenizer.get_vocab()), default=1)

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Read `tokenizer.json` and, where there is one, `tokenizer_config.json`. Raises ModelLoadError."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelLoadError(f"{path} is missing; a model folder needs a tokenizer.json (Hugging Face layout)")
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower for a broken file
            raise ModelLoadError(f"{path} cannot be read as a tokenizer: {error}") from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return cls(tokenizer, read_special_tokens(folder))

    def limited_to(self, max_tokens: int) -> Tokenizer:
        """The same tokenizer, which refuses texts that no encoding makes shorter than `max_tokens`."""
        limited = copy.copy(self)
        limited._max_tokens = max_tokens
        return limited

    @property
    def eos_token_id(self) -> int | None:
        return self._named_id("eos_token")

    @property
    def bos_token_id(self) -> int | None:
        return self._named_id("bos_token")

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Token ids of `text`. Special tokens written in it are parsed; `add_special_tokens` adds those (such as a
        leading BOS) that the tokenizer puts around a plain text; a rendered chat already has them.

        Raises RequestError for text that is not valid Unicode, ContextLengthExceededError for one that is far too long.
        """
        ids: list[int] = self._encode(text, add_special_tokens).ids
        return ids

    def encode_with_marks(self, text: str, marks: Sequence[int]) -> tuple[list[int], list[int | None]]:
        """Token ids of `text`, as `encode` gives them, and for each mark (a place in `text`, in characters, before its
        end) how many tokens lie before it; None for a mark inside a token."""
        encoding = self._encode(text, add_special_tokens=False)
        counts: list[int | None] = []
        for mark in marks:
            index = encoding.char_to_token(mark)
            span = None if index is None else encoding.token_to_chars(index)
            counts.append(index if span is not None and span[0] == mark else None)
        return encoding.ids, counts

    def _encode(self, text: str, add_special_tokens: bool) -> tokenizers.Encoding:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"text has a lone surrogate at character {error.start}; send valid Unicode") from error
        self._refuse_endless(text)
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def _refuse_endless(self, text: str) -> None:
        """By its length alone: encoding holds the interpreter until it is done, seconds for some megabytes."""
        fewest = len(text) // (_NORMALISED_SHRINKS * self._longest_token_bytes)
        if self._max_tokens is not None and fewest >= self._max_tokens:
            raise ContextLengthExceededError(
                self._max_tokens,
                f"your prompt has {len(text)} characters, which are more than {fewest} tokens",
                param="prompt",
            )

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`; bytes that are not UTF-8 become U+FFFD. Raises RequestError for an id out of range."""
        for token_id in token_ids:
            if not 0 <= token_id < 2**32:
                raise RequestError(f"token id {token_id} is outside 0..{self.vocab_size - 1}", param="tokens")
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def new_detokenizer(self) -> Detokenizer:
        """For one request's output; special tokens have no text."""
        return Detokenizer(self._token_bytes, self.special_token_ids)

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes that a token stands for; a character may take several tokens."""
        return self._token_bytes(token_id)

    def token_of(self, token_id: int) -> str | None:
        """The token as it stands in the vocabulary, or None for an id that has none."""
        token: str | None = self._tokenizer.id_to_token(token_id)
        return token

    def id_of(self, token: str) -> int | None:
        token_id: int | None = self._tokenizer.token_to_id(token)
        return token_id

    def _named_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self.id_of(token)


def read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """`tokenizer_config.json` as a dict, empty where there is none. Raises ModelLoadError when it is broken."""
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(config, dict):
        raise ModelLoadError(f"{path} holds a {type(config).__name__}; expected a JSON object")
    return config


def read_special_tokens(folder: Path) -> dict[str, str]:
    """Named special tokens of `tokenizer_config.json`, e.g. {"eos_token": "<|im_end|>"}. Raises ModelLoadError."""
    named: dict[str, str] = {}
    for key, value in read_tokenizer_config(folder).items():
        if not key.endswith("_token"):
            continue
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            named[key] = content
    return named


def _decoder_of(tokenizer: tokenizers.Tokenizer) -> dict[str, Any] | None:
    """The `decoder` entry of the tokenizer's JSON, without writing out the whole vocabulary."""
    if tokenizer.decoder is None:
        return None
    decoder: dict[str, Any] = json.loads(tokenizer.decoder.__getstate__())
    return decoder
