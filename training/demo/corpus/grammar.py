r"""A small language for writing sentences with choices, and its expansion.

[hello|hi|hey]      one of the alternatives; an empty alternative makes a part optional
{animal}            an entry of the lexicon, the same one each time within one piece of text
{animal.sound}      an attribute of that entry
{animal2}           another entry of the list `animal`, different from {animal}
{a animal} {^name}  with an indefinite article; with a capital letter ({A animal}: both)
\[ \{               a plain bracket or brace
<please>            a list that is drawn anew each time, and whose entries may hold choices themselves
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

DATA = Path(__file__).parent / "data"
_SLOT = re.compile(r"\{(?:(a|A) )?(\^?)([a-z_]+?)(\d?)(?:\.([a-z_]+))?\}")


class GrammarError(ValueError):
    """A pattern or a data file that cannot be read; the message holds the text."""


@dataclass(frozen=True)
class Slot:
    key: str
    number: str
    attribute: str | None
    article: str | None
    capital: bool


@dataclass(frozen=True)
class Macro:
    name: str


@dataclass(frozen=True)
class Choice:
    options: tuple[Pattern, ...]


Pattern = tuple["str | Slot | Macro | Choice", ...]


@dataclass(frozen=True)
class Entry:
    """One line of a lexicon list: its text and named attributes."""

    text: str
    attributes: Mapping[str, str] = field(default_factory=dict)


Lexicon = Mapping[str, tuple[Entry, ...]]


@cache
def parse(text: str) -> Pattern:
    pattern, end = _sequence(text, 0, top=True)
    if end != len(text):
        raise GrammarError(f"unbalanced brackets in {text!r}")
    return pattern


def _sequence(text: str, at: int, top: bool) -> tuple[Pattern, int]:
    parts: list[str | Slot | Macro | Choice] = []
    plain: list[str] = []

    def flush() -> None:
        if plain:
            parts.append("".join(plain))
            plain.clear()

    while at < len(text):
        char = text[at]
        if char == "\\" and at + 1 < len(text):
            plain.append(text[at + 1])
            at += 2
        elif char == "[":
            flush()
            options: list[Pattern] = []
            at += 1
            while True:
                option, at = _sequence(text, at, top=False)
                options.append(option)
                if at >= len(text):
                    raise GrammarError(f"a bracket is never closed in {text!r}")
                at += 1
                if text[at - 1] == "]":
                    break
            parts.append(Choice(tuple(options)))
        elif char in "|]" and not top:
            break
        elif char == "{":
            match = _SLOT.match(text, at)
            if match is None:
                raise GrammarError(f"a slot that cannot be read in {text!r}; a plain brace is written \\{{")
            flush()
            article, capital, key, number, attribute = match.groups()
            parts.append(Slot(key, number, attribute, article, bool(capital)))
            at = match.end()
        elif char == "<" and (match := re.compile(r"<([a-z_]+)>").match(text, at)):
            flush()
            parts.append(Macro(match.group(1)))
            at = match.end()
        else:
            plain.append(char)
            at += 1
    flush()
    return tuple(parts), at


def read_lexicon(path: Path) -> dict[str, tuple[Entry, ...]]:
    """A file of lists: `@name`, then entries, `text ; attribute=value ; ...`, or `- a, b, c` for many plain ones."""
    lists: dict[str, list[Entry]] = {}
    current: list[Entry] | None = None
    for line in path.read_text(encoding="utf-8").splitlines():
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        if line.startswith("@"):
            current = lists.setdefault(line[1:], [])
        elif current is None:
            raise GrammarError(f"{path.name}: an entry before the first list: {line!r}")
        elif line.startswith("- "):
            current += [Entry(word.strip()) for word in line[2:].split(",")]
        else:
            text, *rest = (part.strip() for part in line.split(" ; "))
            pairs = [part.split("=", 1) for part in rest]
            if any(len(pair) != 2 for pair in pairs):
                raise GrammarError(f"{path.name}: an attribute without a value: {line!r}")
            current.append(Entry(text, dict(pairs)))
    return {name: tuple(entries) for name, entries in lists.items()}


def with_article(word: str) -> str:
    return f"{'an' if word[:1].lower() in 'aeiou' and not word.startswith(('uni', 'one', 'use')) else 'a'} {word}"


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def invented(rng: random.Random) -> str:
    """A name that nobody has, so that copying a name is learned rather than a list of names."""
    starts = [
        "B",
        "D",
        "F",
        "G",
        "H",
        "J",
        "K",
        "L",
        "M",
        "N",
        "P",
        "R",
        "S",
        "T",
        "V",
        "W",
        "Z",
        "Br",
        "Dr",
        "Gr",
        "Kl",
        "St",
        "Tr",
        "Sh",
        "Th",
        "Ch",
    ]
    middles = ["a", "e", "i", "o", "u", "ai", "ee", "ia", "oo", "ar", "en", "il", "on"]
    ends = ["n", "r", "l", "s", "m", "nd", "ra", "lo", "ki", "ta", "mo", "na", "rin", "bel", "don", "ka", "vi", "to"]
    name = rng.choice(starts) + rng.choice(middles)
    for _ in range(rng.choice((0, 1, 1))):
        name += rng.choice(["b", "d", "f", "g", "k", "l", "m", "n", "p", "r", "s", "t", "v", "z"]) + rng.choice(middles)
    return name + rng.choice(ends)


@dataclass
class Context:
    """Draws of one piece of text: random source, lexicon, and what is bound so far. Owned by one generator call."""

    rng: random.Random
    lexicon: Lexicon
    heldout: bool = False
    """Draw from the last tenth of each long list, which training text never uses."""
    bound: dict[str, Entry] = field(default_factory=dict)

    def bind(self, key: str, text: str, **attributes: str) -> None:
        self.bound[key] = Entry(text, attributes)

    def entries(self, key: str) -> tuple[Entry, ...]:
        if key not in self.lexicon:
            raise GrammarError(f"no lexicon list named {key!r}")
        entries = self.lexicon[key]
        if len(entries) < 60 or any(entry.attributes for entry in entries):
            return entries
        cut = len(entries) * 9 // 10
        return entries[cut:] if self.heldout else entries[:cut]

    def draw(self, key: str, number: str = "") -> Entry:
        name = key + number
        if name not in self.bound:
            taken = [entry for other, entry in self.bound.items() if other.rstrip("0123456789") == key]
            entries = self.entries(key)
            chosen = self.rng.choice(entries)
            if key in ("name", "town") and self.rng.random() < 0.12:
                chosen = Entry(invented(self.rng))
            while chosen in taken and len(entries) > len(taken):
                chosen = self.rng.choice(entries)
            self.bound[name] = chosen
        return self.bound[name]

    def expand(self, text: str) -> str:
        return self._expand(parse(text))

    def _expand(self, pattern: Pattern) -> str:
        out: list[str] = []
        for part in pattern:
            if isinstance(part, str):
                out.append(part)
            elif isinstance(part, Choice):
                out.append(self._expand(self.rng.choice(part.options)))
            elif isinstance(part, Macro):
                out.append(self.expand(self.rng.choice(self.entries(part.name)).text))
            else:
                out.append(self._slot(part))
        return "".join(out)

    def _slot(self, slot: Slot) -> str:
        entry = self.draw(slot.key, slot.number)
        if slot.attribute is None:
            value = entry.text
        elif slot.attribute in entry.attributes:
            value = entry.attributes[slot.attribute]
        else:
            raise GrammarError(f"{slot.key!r} {entry.text!r} has no attribute {slot.attribute!r}")
        if "[" in value or "<" in value or "{" in value:
            value = self.expand(value)
        if slot.article:
            value = with_article(value)
        return capital(value) if slot.capital or slot.article == "A" else value


def to_regex(text: str, lexicon: Lexicon) -> str:
    """A regular expression for everything a pattern can become, in lower case; a name or a town is any one word."""
    return _regex(parse(text), lexicon)


def _regex(pattern: Pattern, lexicon: Lexicon) -> str:
    out: list[str] = []
    for part in pattern:
        if isinstance(part, str):
            out.append(re.escape(part.lower()))
        elif isinstance(part, Choice):
            out.append("(?:" + "|".join(_regex(option, lexicon) for option in part.options) + ")")
        elif isinstance(part, Macro):
            out.append("(?:" + "|".join(to_regex(entry.text, lexicon) for entry in lexicon[part.name]) + ")")
        else:
            out.append(_slot_regex(part, lexicon))
    return "".join(out)


def _slot_regex(slot: Slot, lexicon: Lexicon) -> str:
    if slot.key in ("name", "town"):
        return "[a-z]+"
    entries = lexicon[slot.key]
    values = {entry.attributes[slot.attribute] if slot.attribute else entry.text for entry in entries}
    if slot.article:
        values = {with_article(value) for value in values}
    return "(?:" + "|".join(to_regex(value, lexicon) for value in sorted(values)) + ")"
