"""JSON as it was written: integers of any length, and text with what is no text in it."""

from __future__ import annotations

import json
import math
import re
from typing import Any, NamedTuple

import orjson

Raw = bytes | bytearray

_LEAST_DIGITS = 19
"""Of integers beyond 64 bits, of which orjson makes floats."""
_DIGITS_ALIKE = bytes.maketrans(b"123456789", b"000000000")
_LONG_RUN = b"0" * _LEAST_DIGITS
_NO_DIGIT = re.compile(rb"[^0]")
_BEFORE_A_VALUE = b":[,"
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")
_LOW_ESCAPE = re.compile(rb"\\u[dD][c-fC-F]")
_ESCAPE_BYTES = 6
_ENCODED_SURROGATE = re.compile(rb"\xed[\xa0-\xbf][\x80-\xbf]")
PIECE_BYTES = 2**16
"""What is looked at in one go, for other threads wait meanwhile: each pass over it takes some tens of microseconds."""


class Loaded(NamedTuple):
    """`replaced`: how many lone surrogates have become U+FFFD."""

    value: Any
    replaced: int = 0


def load(raw: Raw) -> Loaded:
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


def _with_exact_integers(raw: Raw, value: Any) -> Any:
    if not _has_long_integer(raw):
        return value
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):  # thousands of digits, or of brackets
        return value


def _has_long_integer(raw: Raw) -> bool:
    """Whether a value may be one: runs of digits are found first, for they are rare. The end of each piece is seen
    again with the next one, where only a run that begins behind its first byte is new."""
    overlap = 2 * _LEAST_DIGITS
    for end in range(PIECE_BYTES, len(raw) + PIECE_BYTES, PIECE_BYTES):
        start = max(0, end - PIECE_BYTES - overlap)
        piece = raw[start:end].translate(_DIGITS_ALIKE)
        run = piece.find(_LONG_RUN)
        while run >= 0:
            if (run or not start) and _begins_a_value(raw, start + run):
                return True
            behind = _NO_DIGIT.search(piece, run)
            run = piece.find(_LONG_RUN, behind.start()) if behind else -1
    return False


def _begins_a_value(raw: Raw, place: int) -> bool:
    """Whether the digit at `place` begins a number that is a value, or might be, for all that stands before it."""
    before = place - 1
    if before >= 0 and raw[before] == ord("-"):
        before -= 1
    while before >= 0 and raw[before] in b" \t\r\n":
        before -= 1
    return before < 0 or raw[before] in _BEFORE_A_VALUE


def _without_lone_surrogates(raw: Raw) -> tuple[Raw, int]:
    kept: list[Raw] = []
    end = low = 0
    for found in _SURROGATE_ESCAPE.finditer(raw):
        start = found.start()
        if start < low or _is_escaped(raw, start):
            continue
        if found[0][3] in b"89abAB" and _LOW_ESCAPE.match(raw, found.end()):
            low = found.end() + _ESCAPE_BYTES
            continue
        kept += (raw[end:start], b"\\ufffd")
        end = found.end()
    replaced = len(kept) // 2
    mended = b"".join((*kept, raw[end:])) if kept else raw
    mended, encoded = _ENCODED_SURROGATE.subn("\ufffd".encode(), mended)
    return mended, replaced + encoded


def _is_escaped(raw: Raw, place: int) -> bool:
    """Whether the backslash at `place` is itself what another one escapes."""
    before = place
    while before and raw[before - 1] == ord("\\"):
        before -= 1
    return (place - before) % 2 == 1


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
