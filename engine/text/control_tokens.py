"""The tokens by which a model tells turns apart, and how those that a chat template writes differ from those in a
client's text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from engine.errors import ChatTemplateError

STAND_INS = tuple(
    map(
        chr,
        [*range(0xFDD0, 0xFDF0), *(plane + last for plane in range(0, 0x110000, 0x10000) for last in (0xFFFE, 0xFFFF))],
    )
)
"""Unicode's noncharacters, which are not for interchange (core specification, 23.7), so no text has a right to one."""

REPLACEMENT = "\ufffd"
_PART_CHARACTERS = 65536
_NEVER_TEXT = re.compile(f"[\ud800-\udfff{''.join(STAND_INS)}]")


class ControlTokens:
    """The control tokens that a template may write, each with a stand-in: one character that no text can have.

    A template's own literals are marked before it is compiled. So a stand-in in what it writes is the template's token,
    and a control token that is spelled out there came from a message. Immutable.
    """

    def __init__(self, tokens: Iterable[str]) -> None:
        """Raises ChatTemplateError for more tokens than there are stand-ins."""
        in_order = sorted(set(tokens), key=lambda token: (-len(token), token))
        if len(in_order) > len(STAND_INS):
            raise ChatTemplateError(
                f"the chat template has {len(in_order)} control tokens; at most {len(STAND_INS)} can be told apart "
                "from text; start with --parse-special-tokens"
            )
        self.stand_ins: Mapping[str, str] = dict(zip(in_order, STAND_INS, strict=False))
        self._spellings = {stand_in: token for token, stand_in in self.stand_ins.items()}
        self._spelled = _any_of(self.stand_ins)
        self._marked = _any_of(self._spellings)

    def mark(self, literal: str) -> str:
        """A template's literal with stand-ins for its control tokens."""
        return self._spelled.sub(lambda found: self.stand_ins[found[0]], literal) if self._spelled else literal

    def spell(self, text: str) -> str:
        """What was written with stand-ins, as it reads."""
        return self._marked.sub(lambda found: self._spellings[found[0]], text) if self._marked else text


def only_text(value: Any) -> Any:
    """A copy of JSON-like data in which what no text can have, lone surrogates and noncharacters, is U+FFFD."""
    if isinstance(value, str):
        return value if value.isascii() or _is_text(value) else _with_replacements(value)
    if isinstance(value, Mapping):
        return {only_text(key): only_text(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [only_text(part) for part in value]
    return value


def _is_text(value: str) -> bool:
    """By searches that take a millisecond where a pattern takes a hundred, for other threads wait meanwhile."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return not any(stand_in in value for stand_in in STAND_INS)


def _with_replacements(value: str) -> str:
    parts = (value[start : start + _PART_CHARACTERS] for start in range(0, len(value), _PART_CHARACTERS))
    return "".join(_NEVER_TEXT.sub(REPLACEMENT, part) for part in parts)


def _any_of(strings: Iterable[str]) -> re.Pattern[str] | None:
    """The first in order wins where several begin."""
    alternatives = "|".join(map(re.escape, strings))
    return re.compile(alternatives) if alternatives else None
