"""Proof that the held-out questions are new: no pattern of the corpus can produce one, no training chat holds one."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

from training.demo.config import TrainPlan
from training.demo.corpus.documents import HELDOUT_FILE, document
from training.demo.corpus.grammar import to_regex
from training.demo.corpus.intents import intents, lexicon
from training.demo.corpus.memory import KINDS
from training.demo.corpus.style import CLOSERS, OPENERS, normalise


@dataclass(frozen=True)
class HeldoutQuestion:
    id: int
    subject: str
    question: str
    topic: tuple[str, ...]
    """Lower-case parts of words, one of which an answer on topic holds."""


def heldout_questions() -> list[HeldoutQuestion]:
    lines = HELDOUT_FILE.read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines if line.strip()]
    return [HeldoutQuestion(r["id"], r["subject"], r["question"], tuple(r["topic"])) for r in records]


def question_patterns() -> Iterator[str]:
    for subject in ("smalltalk", "daemon"):
        for intent in intents(subject):
            yield from intent.questions
    for said, _, asked, _ in KINDS:
        yield said
        yield asked


def _plain(question: str) -> str:
    """The question as a pattern would give it: lower case, without end marks, openers and closers of `style`."""
    text = question.lower().rstrip("?.! ")
    for opener in OPENERS:
        text = text.removeprefix(opener)
    for closer in CLOSERS:
        text = text.removesuffix(closer)
    return text


def producible() -> list[tuple[HeldoutQuestion, str]]:
    """Each held-out question that a pattern could become, whatever its slots hold, with the pattern."""
    compiled = []
    for pattern in question_patterns():
        loose = re.sub(r"(?:\\ )+", r" +", re.sub(r"\s+", " ", to_regex(pattern, lexicon())))
        compiled.append((pattern, re.compile(r"\s*" + loose + r"\s*")))
    found = []
    for question in heldout_questions():
        text = _plain(question.question)
        found += [(question, pattern) for pattern, regex in compiled if regex.fullmatch(text)]
    return found


def emitted(documents: int, seed: int, varied: bool = False) -> list[tuple[int, str]]:
    """Training chats among the first `documents` that hold a held-out question, whatever its case and marks."""
    wanted = {normalise(question.question) for question in heldout_questions()}
    found = []
    for index in range(documents):
        for message in document(seed, index, varied=varied).messages:
            if message["role"] == "user" and normalise(message["content"]) in wanted:
                found.append((index, message["content"]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=20_000, help="training chats to search")
    options = parser.parse_args()
    for question, pattern in producible():
        print(f"{question.id}: {question.question!r} can come from {pattern!r}")
    for varied in (False, True):
        for index, text in emitted(options.documents, TrainPlan().seed, varied):
            print(f"chat {index} holds {text!r}")


if __name__ == "__main__":
    main()
