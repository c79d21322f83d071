"""JSON as it was written: integers of any length, and text with what is no text in it."""

from __future__ import annotations

import json
import math
import re
from typing import Any, NamedTuple

import orjson

_LEAST_DIGITS = 19
"""Of integers beyond 64 bits, of which orjson makes floats."""
_LONG_INTEGER = re.compile(rb"[:\[,]\s*-?[0-9]{%d}" % _LEAST_DIGITS)
_DIGITS_ALIKE = bytes.maketrans(b"123456789", b"000000000")
_HIGH, _LOW = rb"u[dD][89abAB][0-9a-fA-F]{2}", rb"u[dD][c-fC-F][0-9a-fA-F]{2}"
_ESCAPE = re.compile(rb"\\(?:%b\\%b|%b|%b|.)" % (_HIGH, _LOW, _HIGH, _LOW), re.DOTALL)
_LONE_ESCAPE_BYTES = 6
_ENCODED_SURROGATE = re.compile(rb"\xed[\xa0-\xbf][\x80-\xbf]")


class Loaded(NamedTuple):
    """`replaced`: how many lone surrogates have become U+FFFD."""

    value: Any
    replaced: int = 0


def load(raw: bytes) -> Loaded:
    """Raises orjson.JSONDecodeError for what is no JSON but for lone surrogates."""
    try:
        return Loaded(_with_exact_integers(raw, orjson.loads(raw)))
    except orjson.JSONDecodeError:
        mended, replaced = _without_lone_surrogates(raw)
        if not replaced:
            raise
    return Loaded(_with_exact_integers(mended, orjson.loads(mended)), replaced)


def load_object(text: str) -> dict[str, Any] | None:
    """The object that `text` is, if another text of it says the same: not where a key comes twice, or a number is no
    finite one."""
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _with_exact_integers(raw: bytes, value: Any) -> Any:
    # The plain search is fifty times as fast as the pattern, and other threads wait for either.
    if b"0" * _LEAST_DIGITS not in raw.translate(_DIGITS_ALIKE) or _LONG_INTEGER.search(raw) is None:
        return value
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):  # thousands of digits, or of brackets
        return value


def _without_lone_surrogates(raw: bytes) -> tuple[bytes, int]:
    replaced = 0

    def mend(escape: re.Match[bytes]) -> bytes:
        nonlocal replaced
        if len(escape[0]) != _LONE_ESCAPE_BYTES:  # a pair, or another escape
            return escape[0]
        replaced += 1
        return b"\\ufffd"

    mended = _ESCAPE.sub(mend, raw)
    mended, encoded = _ENCODED_SURROGATE.subn("\ufffd".encode(), mended)
    return mended, replaced + encoded


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key comes twice")
    return found


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("too large for a number")
    return value
