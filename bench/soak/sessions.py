"""What is asked in a soak: agentic sessions of many shapes, each fixed by a seed and by the answers that it gets."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any

from bench.conversations import WORDS

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"

_SYSTEM_PROMPTS = 4
_MOST_TURNS = 9
_TOOLS = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{name} something",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
        },
    }
    for name in ("read_file", "search")
)


@dataclass(frozen=True, slots=True)
class Ask:
    """One body to send. Those of one session come one after the other."""

    path: str
    body: dict[str, Any]
    is_refused: bool = False
    """Whether the daemon must refuse it (400)."""
    copies: int = 1
    """How many of it are sent at once."""


Session = Generator[Ask, str, None]
"""Yields what to ask, and is sent the text of the answer; one that is closed early has lost its client."""

Messages = list[dict[str, Any]]


def new_session(seed: int, number: int) -> Session:
    """The session of this number: the same for the same seed."""
    choice = random.Random(f"soak {seed} {number}")
    shapes: list[Callable[[random.Random, int, int], Session]] = [
        *(_chat, _chat, _chat, _tool_loop, _tool_loop, _sub_agent, _sub_agent),
        *(_one_shot, _edited, _forked, _text, _burst, _thinker, _refused),
    ]
    return choice.choice(shapes)(choice, seed, number)


def words(choice: random.Random, least: int, most: int) -> str:
    return " ".join(choice.choices(WORDS, k=choice.randint(least, most)))


def _system(seed: int, number: int) -> dict[str, Any]:
    """One of few, so that sessions share them."""
    which = number % _SYSTEM_PROMPTS
    return {"role": "system", "content": words(random.Random(f"system {seed} {which}"), 15, 40)}


def _user(choice: random.Random, least: int = 4, most: int = 16) -> dict[str, Any]:
    return {"role": "user", "content": words(choice, least, most)}


def _assistant(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def _talk(choice: random.Random, messages: Messages, turns: int, **options: Any) -> Session:
    """Turns of an append-only conversation. `messages` grows."""
    for _ in range(turns):
        messages.append(_user(choice))
        text = yield Ask(CHAT, {"messages": list(messages), **_sampling(choice), **options})
        messages.append(_assistant(text))


def _chat(choice: random.Random, seed: int, number: int) -> Session:
    yield from _talk(choice, [_system(seed, number)], choice.randint(2, _MOST_TURNS))


def _thinker(choice: random.Random, seed: int, number: int) -> Session:
    """Its answers are thoughts, which the template strips from the history."""
    yield from _talk(choice, [_system(seed, number)], choice.randint(2, 5), enable_thinking=True)


def _tool_loop(choice: random.Random, seed: int, number: int) -> Session:
    """One question, then calls of tools and their results, as long as the loop goes."""
    messages: Messages = [_system(seed, number), _user(choice)]
    for step in range(choice.randint(3, _MOST_TURNS)):
        text = yield Ask(CHAT, {"messages": list(messages), "tools": list(_TOOLS), **_sampling(choice)})
        function = {"name": "read_file", "arguments": json.dumps({"path": words(choice, 1, 2)})}
        call = {"id": f"call_{number}_{step}", "type": "function", "function": function}
        messages.append(_assistant(text, tool_calls=[call]))
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": words(choice, 4, 12)})


def _sub_agent(choice: random.Random, seed: int, number: int) -> Session:
    """Its preamble is that of its siblings: sessions of about the same number."""
    family = random.Random(f"family {seed} {number // 40}")
    preamble = {"role": "system", "content": words(family, 60, 90)}
    yield from _talk(choice, [preamble], choice.randint(1, 3))


def _one_shot(choice: random.Random, seed: int, number: int) -> Session:
    yield Ask(CHAT, {"messages": [_user(choice, 20, 90)], **_sampling(choice)})


def _edited(choice: random.Random, seed: int, number: int) -> Session:
    """Midway, the client rewrites what was said earlier."""
    messages: Messages = [_system(seed, number)]
    yield from _talk(choice, messages, choice.randint(3, 5))
    place = choice.randrange(1, len(messages) - 1)
    messages[place] = {**messages[place], "content": words(choice, 4, 12)}
    yield from _talk(choice, messages, choice.randint(1, 3))


def _forked(choice: random.Random, seed: int, number: int) -> Session:
    """Goes on from an earlier place once more, then from its end again."""
    messages: Messages = [_system(seed, number)]
    yield from _talk(choice, messages, choice.randint(4, 6))
    yield from _talk(choice, messages[: 1 + 2 * choice.randint(1, 2)], choice.randint(1, 3))
    yield from _talk(choice, messages, 1)


def _text(choice: random.Random, seed: int, number: int) -> Session:
    """Echoes everything exactly, so that each prompt goes on where the last answer ended."""
    text = words(choice, 20, 40)
    for _ in range(choice.randint(2, 6)):
        text += yield Ask(TEXT, {"prompt": text, **_sampling(choice)})
        text += " " + words(choice, 4, 12)


def _burst(choice: random.Random, seed: int, number: int) -> Session:
    """The same prompt many times at once."""
    body = {"messages": [_system(seed, number), _user(choice)], **_sampling(choice)}
    yield Ask(CHAT, body, copies=choice.randint(3, 6))


def _refused(choice: random.Random, seed: int, number: int) -> Session:
    messages = [_user(choice)]
    tool = {"type": "function", "function": {"parameters": 3}}
    bad: list[dict[str, Any]] = [
        {"messages": messages, "temperature": 9},
        {"messages": []},
        {"messages": [_user(choice, 3000, 3000)]},
        {"messages": messages, "tools": [tool]},
        {"messages": [{"role": "user", "content": None}]},
    ]
    yield Ask(CHAT, choice.choice(bad), is_refused=True)


def _sampling(choice: random.Random) -> dict[str, Any]:
    options: dict[str, Any] = {"max_tokens": choice.randint(1, 8), "temperature": 0}
    if choice.random() < 0.2:
        options |= {"temperature": 1.0, "seed": choice.randrange(2**31)}
    if choice.random() < 0.1:
        options |= {"stop": [choice.choice(WORDS)]}
    return options


def sessions(seed: int) -> Iterator[Session]:
    """Without end."""
    number = 0
    while True:
        yield new_session(seed, number)
        number += 1
