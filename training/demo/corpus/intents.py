"""Intents: many ways to ask one thing, and many ways to answer it, read from the data files."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import cache, lru_cache

from training.demo.corpus.grammar import DATA, Context, GrammarError, Lexicon, read_lexicon


@dataclass
class Intent:
    name: str
    subject: str
    questions: list[str] = field(default_factory=list)
    heldout_questions: list[str] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)


@lru_cache(maxsize=1)
def lexicon() -> Lexicon:
    return {**read_lexicon(DATA / "lexicon.txt"), **read_lexicon(DATA / "stories.txt")}


@cache
def intents(subject: str) -> tuple[Intent, ...]:
    """The intents of `smalltalk` or `daemon`. Lines: `== name`, `> question`, `>! held-out question`, `< answer`."""
    found: list[Intent] = []
    for line in (DATA / f"{subject}.txt").read_text(encoding="utf-8").splitlines():
        line = line.strip()
        if line.startswith("== "):
            found.append(Intent(line[3:], subject))
        elif line.startswith(">! "):
            found[-1].heldout_questions.append(line[3:])
        elif line.startswith("> "):
            found[-1].questions.append(line[2:])
        elif line.startswith("< "):
            found[-1].answers.append(line[2:].replace("\\n", "\n"))
        elif line and not line.startswith("#"):
            raise GrammarError(f"{subject}.txt: a line of no kind: {line!r}")
    for intent in found:
        if not intent.questions or not intent.answers:
            raise GrammarError(f"{subject}.txt: intent {intent.name!r} lacks questions or answers")
    return tuple(found)


def tidy(text: str) -> str:
    """Single spaces, no space before punctuation, no doubled full stop."""
    lines = (" ".join(line.split()) for line in text.split("\n"))
    out = "\n".join(lines)
    for mark in ".,!?":
        out = out.replace(" " + mark, mark)
    return out.replace("..", ".").replace(".!", "!").replace("?.", "?").replace("!.", "!").strip()


def sentence_case(text: str) -> str:
    """A capital letter at the start of the text and after each full stop."""
    out, fresh = [], True
    for char in text:
        out.append(char.upper() if fresh and char.isalpha() else char)
        fresh = char == "\n" or (fresh and char in " \"'")
    joined = "".join(out)
    for mark in (". ", "! ", "? "):
        head, *rest = joined.split(mark)
        joined = mark.join([head, *(part[:1].upper() + part[1:] for part in rest)])
    return joined


def exchange(intent: Intent, ctx: Context) -> tuple[str, str]:
    """A question (lower case, bare) and its answer, with shared bindings."""
    pool = intent.questions
    if ctx.heldout and intent.heldout_questions and ctx.rng.random() < 0.7:
        pool = intent.heldout_questions
    question = ctx.expand(ctx.rng.choice(pool))
    answer = ctx.expand(ctx.rng.choice(intent.answers))
    return tidy(question), sentence_case(tidy(answer))


def fresh(rng: random.Random, heldout: bool) -> Context:
    return Context(rng, lexicon(), heldout)
