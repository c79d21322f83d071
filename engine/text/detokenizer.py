"""Tokens to text as they come, never splitting a character."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from engine.errors import ModelLoadError

_WORD_BOUNDARY = "▁"

ByteDecoder = Callable[[str], bytes]


class TokenBytes:
    """The bytes that each token stands for. Safe to share: it only fills a memo.

    Covers the decoders of byte-level BPE (GPT-2, Llama 3, Qwen) and of SentencePiece (Llama 2), with or without byte
    fallback.
    """

    def __init__(self, token_of: Callable[[int], str | None], decoder: Mapping[str, Any] | None) -> None:
        """`token_of` maps an id to its token; `decoder` is the `decoder` entry of a tokenizer.json.

        Raises ModelLoadError for a decoder that is not covered.
        """
        steps = _flatten(decoder)
        kinds = {step.get("type") for step in steps}
        if not kinds or kinds - {"ByteLevel", "ByteFallback", "Replace", "Fuse", "Strip", "Metaspace"}:
            raise ModelLoadError(
                f"tokenizer.json: decoder {sorted(map(str, kinds)) or None} is not supported; expected ByteLevel, "
                "Metaspace, or a Sequence of Replace, ByteFallback, Fuse and Strip"
            )
        self._token_of = token_of
        self._to_bytes = _byte_level if "ByteLevel" in kinds else _sentence_piece(steps)
        self.leading_spaces_to_strip = max((_leading_spaces(step) for step in steps), default=0)
        self._memo: dict[int, bytes] = {}

    def __call__(self, token_id: int) -> bytes:
        """The bytes of one token; empty for an id without a token, as `decode` has it."""
        found = self._memo.get(token_id)
        if found is None:
            token = self._token_of(token_id)
            found = b"" if token is None else self._to_bytes(token)
            self._memo[token_id] = found
        return found


class Detokenizer:
    """One request's text. Mutable: for one caller at a time. Work per token does not grow with the text."""

    def __init__(self, token_bytes: TokenBytes, skipped_ids: frozenset[int]) -> None:
        """Tokens in `skipped_ids` (the special ones) have no text."""
        self._token_bytes = token_bytes
        self._skipped_ids = skipped_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._spaces_to_strip = token_bytes.leading_spaces_to_strip

    def push(self, token_id: int) -> str:
        """The characters that this token completes, possibly none; bytes that are not UTF-8 become U+FFFD."""
        if token_id in self._skipped_ids:
            return ""
        return self._strip(self._decoder.decode(self._token_bytes(token_id)))

    def flush(self) -> str:
        """What is left at the end of the text: U+FFFD for an unfinished character, or nothing."""
        return self._strip(self._decoder.decode(b"", final=True))

    def _strip(self, text: str) -> str:
        while self._spaces_to_strip and text:
            if text[0] != " ":
                self._spaces_to_strip = 0
                break
            text = text[1:]
            self._spaces_to_strip -= 1
        return text


def _flatten(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if decoder is None:
        return []
    if decoder.get("type") == "Sequence":
        return [step for part in decoder.get("decoders", ()) for step in _flatten(part)]
    return [decoder]


def _leading_spaces(step: Mapping[str, Any]) -> int:
    if step.get("type") == "Strip" and step.get("content") == " ":
        return int(step.get("start", 0))
    if step.get("type") == "Metaspace":
        return 0 if step.get("prepend_scheme") == "never" or step.get("add_prefix_space") is False else 1
    return 0


@lru_cache(maxsize=1)
def _byte_of_character() -> dict[str, int]:
    """GPT-2's printable stand-ins: printable Latin-1 characters stand for themselves, the others for U+0100 onward."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return table


def _byte_level(token: str) -> bytes:
    """A token with a character outside the alphabet (an added token with a space, say) stands for itself."""
    table = _byte_of_character()
    try:
        return bytes(table[character] for character in token)
    except KeyError:
        return token.encode()


def _sentence_piece(steps: list[Mapping[str, Any]]) -> ByteDecoder:
    replacements = [(_pattern(step), str(step["content"])) for step in steps if step.get("type") == "Replace"]
    replacements += [
        (str(step.get("replacement", _WORD_BOUNDARY)), " ") for step in steps if step.get("type") == "Metaspace"
    ]
    has_byte_fallback = any(step.get("type") == "ByteFallback" for step in steps)

    def decode(token: str) -> bytes:
        if has_byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                pass
        for pattern, content in replacements:
            token = token.replace(pattern, content)
        return token.encode()

    return decode


def _pattern(step: Mapping[str, Any]) -> str:
    pattern = step.get("pattern")
    text = pattern.get("String") if isinstance(pattern, Mapping) else None
    if not isinstance(text, str):
        raise ModelLoadError(f"tokenizer.json: decoder Replace has the pattern {pattern!r}; expected a String")
    return text
