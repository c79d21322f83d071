"""What a load asks: prompts and conversations, fixed by a seed before the first request is sent."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

WORDS: tuple[str, ...] = (
    *("river", "stone", "winter", "garden", "music", "letter", "window", "morning", "silver", "market", "captain"),
    *("forest", "engine", "paper", "summer", "bridge", "island", "candle", "doctor", "mirror", "valley", "thunder"),
    *("orange", "ticket", "shadow", "harbor", "needle", "pocket", "station", "planet", "feather", "copper"),
)
"""Ordinary words: text for prompts, and where their tokens are drawn from."""


@dataclass(frozen=True, slots=True)
class Load:
    """How much to ask, and how fast. Exactly one of `concurrency` and `rate` says when the next request begins."""

    requests: int
    concurrency: int | None
    """Closed loop: so many conversations at any time, the next begins when one ends."""
    rate: float | None
    """Open loop: requests per second that arrive on average, as a Poisson process, whether the others have ended."""
    turns: int
    """Requests of a conversation; each sends the ones before and their answers again."""
    prompt_tokens: int
    """Tokens of a prompt, or about so many of a user's message."""
    max_tokens: int
    """Tokens of every answer."""
    hit_share: float
    """Share of conversations that begin with a prompt that was sent before."""
    seed: int


@dataclass(frozen=True, slots=True)
class Conversation:
    """One conversation; conversations of the same `prompt` begin with the same message."""

    number: int
    prompt: int
    turns: int


@dataclass(frozen=True, slots=True)
class Material:
    """What prompts are made of, as the served model counts it."""

    token_ids: Sequence[int]
    tokens_per_word: float


def plan_conversations(load: Load) -> list[Conversation]:
    """Who asks what, in order; the turns add up to `load.requests`."""
    choice = random.Random(f"{load.seed} choice")
    prompts: list[int] = []
    conversations = []
    for number, first in enumerate(range(0, load.requests, load.turns)):
        is_hit = bool(prompts) and choice.random() < load.hit_share
        prompt = choice.choice(prompts) if is_hit else number
        if not is_hit:
            prompts.append(prompt)
        conversations.append(Conversation(number, prompt, min(load.turns, load.requests - first)))
    return conversations


def arrivals(load: Load) -> Iterator[float]:
    """Seconds from the start at which conversations begin in an open loop, without end."""
    assert load.rate is not None
    gaps = random.Random(f"{load.seed} arrivals")
    at_seconds = 0.0
    while True:
        yield at_seconds
        at_seconds += gaps.expovariate(load.rate / load.turns)


def prompt_tokens(load: Load, conversation: Conversation, material: Material) -> list[int]:
    """A prompt of exactly `load.prompt_tokens` tokens."""
    return random.Random(f"{load.seed} prompt {conversation.prompt}").choices(material.token_ids, k=load.prompt_tokens)


def message(load: Load, conversation: Conversation, turn: int, material: Material) -> str:
    """What the user says in a turn (0 is the first): about `load.prompt_tokens` tokens of text."""
    whose = f"prompt {conversation.prompt}" if turn == 0 else f"turn {conversation.number} {turn}"
    words = max(1, round(load.prompt_tokens / material.tokens_per_word))
    return " ".join(random.Random(f"{load.seed} {whose}").choices(WORDS, k=words))
