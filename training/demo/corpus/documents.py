"""The infinite stream of training chats: document `index` of a seed is always the same chat."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from training.demo.corpus import memory, story_requests, tools
from training.demo.corpus.grammar import capital
from training.demo.corpus.intents import Intent, exchange, fresh, intents
from training.demo.corpus.skills import skill
from training.demo.corpus.style import dress, normalise
from training.demo.corpus.vary import vary

HELDOUT_FILE = Path(__file__).parents[1] / "heldout_questions.jsonl"
SYSTEMS = (
    "You are a helpful assistant.",
    "You are demo, a small model.",
    "Answer in one or two sentences.",
    "You are a friendly assistant.",
    "You are a helpful and honest assistant.",
    "You are a storyteller.",
    "Be brief.",
    "You are the assistant of the dalsegno daemon.",
    "Answer kindly.",
    "You are a polite assistant. Keep your answers short.",
    "You help people to use dalsegno.",
    "Speak plain English.",
    "You are an assistant.",
    "You are a helpful assistant. Answer truthfully.",
    "You are a cheerful companion.",
    "Talk like a friend.",
    "You are a concise assistant.",
    "Help the user.",
    "You are a teacher for small children.",
    "You are a helpful assistant for a small company.",
)


@dataclass
class Document:
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=list)


@lru_cache(maxsize=1)
def heldout_normalised() -> frozenset[str]:
    """Normalised held-out questions; no user turn of the training stream may equal one of them."""
    if not HELDOUT_FILE.exists():
        return frozenset()
    lines = HELDOUT_FILE.read_text(encoding="utf-8").splitlines()
    return frozenset(normalise(json.loads(line)["question"]) for line in lines if line.strip())


_WIDE = (
    "like_thing",
    "what_is_thing",
    "user_likes_thing",
    "why_thing",
    "compare",
    "animal_what",
    "animal_like",
    "opposite",
    "rhyme",
)


@cache
def _weighted(subject: str) -> tuple[tuple[Intent, ...], tuple[float, ...]]:
    """An intent with more ways to ask is asked more often, less than in proportion."""
    found = intents(subject)
    return found, tuple((1.0 + len(i.questions)) ** 0.5 * (2.5 if i.name in _WIDE else 1.0) for i in found)


def _intent(rng: random.Random, subject: str) -> Intent:
    found, weights = _weighted(subject)
    return rng.choices(found, weights)[0]


def _simple(rng: random.Random, heldout: bool, varied: bool = False) -> list[tuple[str, str]]:
    """One exchange of any subject (sometimes a story with questions about it)."""
    pick = rng.random()
    ctx = fresh(rng, heldout)
    if pick < 0.38:
        question, answer = exchange(_intent(rng, "smalltalk"), ctx)
    elif pick < 0.66:
        question, answer = exchange(_intent(rng, "daemon"), ctx)
    elif pick < 0.80:
        if rng.random() < 0.25:
            return [(dress(rng, q), a) for q, a in story_requests.about_story(ctx)]
        question, answer, _ = story_requests.request_and_story(ctx, varied)
    elif pick < 0.84:
        return [story_requests.continuation(ctx)]
    elif pick < 0.88:
        return [memory.reading(ctx)]
    else:
        question, answer = skill(rng, heldout)
        return [(dress(rng, question, plain="repeat" in question or "say" in question), answer)]
    if varied and rng.random() < 0.8:
        question = vary(rng, question)
    return [(dress(rng, question), answer)]


def _chat(rng: random.Random, exchanges: int, heldout: bool, varied: bool = False) -> list[tuple[str, str]]:
    """Mixed exchanges, with things said early and asked for later."""
    turns: list[tuple[str, str]] = []
    ctx = fresh(rng, heldout)
    said = memory.memories(ctx, rng.choice((1, 1, 2, 3))) if rng.random() < 0.6 else []
    for item in said:
        turns.append((dress(rng, item.said), item.reply))
    middle: list[tuple[str, str]] = []
    while len(middle) + 2 * len(said) < exchanges:
        middle += _simple(rng, heldout, varied)
    recalls = [(dress(rng, item.asked), item.recalled) for item in said]
    rng.shuffle(recalls)
    for recall in recalls:
        middle.insert(rng.randint(0, len(middle)), recall)
    return turns + middle


def _thought(rng: random.Random, question: str) -> str:
    bare = question.rstrip("?.! ")
    bare = bare if len(bare) < 80 else bare[:77].rsplit(" ", 1)[0] + "..."
    return rng.choice(
        (
            f'The user says "{bare}". I should answer briefly.',
            f'The question is "{bare}". I will answer in simple words.',
            f'"{bare}": this is simple. I will keep it short.',
            f'I am asked: "{bare}". A short answer is best.',
            f'The user wrote "{bare}". Let me say what I know.',
            f'The message is "{bare}". I give a kind, plain reply.',
        )
    )


def _messages(turns: list[tuple[str, str]]) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    for question, answer in turns:
        out += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return out


def _draw(rng: random.Random, heldout: bool, long_chats: bool, varied: bool) -> Document:
    kind = rng.random()
    if long_chats:
        document = Document(_messages(_chat(rng, rng.randint(8, 24), heldout, varied)))
    elif kind < 0.05:
        listed, messages = tools.tool_chat(fresh(rng, heldout))
        messages[0]["content"] = capital(messages[0]["content"]) + rng.choice(("?", "", "."))
        before = _messages(_simple(rng, heldout)) if rng.random() < 0.3 else []
        after = _messages(_simple(rng, heldout)) if rng.random() < 0.3 else []
        document = Document([*before, *messages, *after], listed)
    elif kind < (0.80 if varied else 0.62):
        document = Document(_messages(_simple(rng, heldout, varied)))
    else:
        document = Document(_messages(_chat(rng, rng.choice((2, 2, 3, 3, 4, 5, 6, 8)), heldout, varied)))
    if rng.random() < 0.06 and not document.tools:
        last = document.messages[-1]
        last["reasoning_content"] = _thought(rng, document.messages[-2]["content"])
    if rng.random() < 0.35:
        document.messages.insert(0, {"role": "system", "content": rng.choice(SYSTEMS)})
    return document


def document(seed: int, index: int, heldout: bool = False, long_chats: bool = False, varied: bool = False) -> Document:
    """Chat number `index` of a stream. The held-out one uses held-out names and phrasings, the training one never.

    `varied` puts requests into other words on top of the patterns; the second part of the training reads that.
    """
    kind = f"{'heldout' if heldout else 'train'}/{'long' if long_chats else 'plain'}{'/varied' if varied else ''}"
    rng = random.Random(f"{seed}/{kind}/{index}")
    while True:
        made = _draw(rng, heldout, long_chats, varied)
        asked = {normalise(m["content"]) for m in made.messages if m["role"] == "user"}
        if heldout or not asked & heldout_normalised():
            return made
