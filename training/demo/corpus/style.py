"""How people type: openers, politeness, case, punctuation, small mistakes."""

from __future__ import annotations

import random
import re

OPENERS = (
    "hey, ",
    "hi, ",
    "hello, ",
    "so, ",
    "well, ",
    "ok, ",
    "and ",
    "now, ",
    "quick question: ",
    "tell me, ",
    "one question: ",
    "demo, ",
)
CLOSERS = (" please", ", please", " thanks", ", thank you", " then", " again", ", demo", " my friend")
_QUESTION = re.compile(
    r"^(what|who|where|when|why|how|which|is|are|do|does|did|can|could|will|would|should|have|has|may|was|were|am|"
    r"in which|any|to whom)\b"
)
_PROPER = re.compile(r"\bi\b|\bi'm\b|\bi've\b")


def normalise(text: str) -> str:
    """Lower case, letters and digits only, single spaces: the form in which held-out questions are compared."""
    return " ".join(re.findall(r"[a-z0-9']+", text.lower()))


def _typo(rng: random.Random, text: str) -> str:
    spots = [
        i for i in range(1, len(text) - 1) if text[i - 1].isalpha() and text[i].isalpha() and text[i + 1].isalpha()
    ]
    if not spots:
        return text
    at = rng.choice(spots)
    kind = rng.randrange(3)
    if kind == 0:
        return text[:at] + text[at + 1 :]
    if kind == 1:
        return text[:at] + text[at + 1] + text[at] + text[at + 2 :]
    return text[:at] + text[at] + text[at:]


def dress(rng: random.Random, text: str, plain: bool = False) -> str:
    """A bare lower-case request as somebody might type it. `plain` keeps every word as it is."""
    asks = bool(_QUESTION.match(text)) or ", what" in text or ", who" in text
    if not plain and len(text.split()) > 2 and rng.random() < 0.16:
        text = rng.choice(OPENERS) + text
    if not plain and len(text.split()) > 2 and rng.random() < 0.08:
        text += rng.choice(CLOSERS)
    if not plain and rng.random() < 0.04:
        text = _typo(rng, text)
    style = rng.random()
    if style < 0.60:
        text = _PROPER.sub(lambda match: match.group().capitalize(), text)
        text = text[:1].upper() + text[1:]
        if not text.endswith(("?", "!", ".")):
            text += "?" if asks else rng.choice((".", "", "!" if len(text) < 30 else "."))
    elif style < 0.80:
        if not text.endswith(("?", "!", ".")) and rng.random() < 0.6:
            text += "?" if asks else "."
    elif style < 0.97:
        text = text.lower()
    elif not plain:
        text = text.upper()
    return text
