"""What is asked in a drill: conversations that take turns, more than the device holds and fewer than all tiers."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass
from typing import Any

from bench.soak.client import Manner, SoakClient
from bench.soak.sessions import CHAT, Ask, Messages, words
from engine.errors import EngineError

CONVERSATIONS = 10
_TURNS = (10, 18)
_WORDS = (20, 30)
_MAX_TOKENS = 8
_WHOLE = Manner(is_streamed=False)


class DrillError(EngineError):
    """The drill cannot go on: the daemon refused or failed what has nothing to do with the fault."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One answer and what of its prompt was reused."""

    number: int
    """1 is the first of the drill."""
    prompt_tokens: int
    cached_tokens: int
    achievable_tokens: int
    path: str

    @property
    def is_chance(self) -> bool:
        """Whether a turn of this conversation had been computed before."""
        return self.achievable_tokens > _WORDS[0]

    @property
    def is_missed(self) -> bool:
        """Whether most of what could have been reused was computed again."""
        return self.is_chance and self.cached_tokens < self.achievable_tokens / 2


class Traffic:
    """Asks one request at a time, of the conversation that has waited longest. Mutable."""

    def __init__(self, client: SoakClient, seed: int = 0) -> None:
        self.asked = 0
        self._client = client
        self._choice = random.Random(f"drill {seed}")
        self._conversations: deque[_Conversation] = deque()
        self.begin_anew()

    def begin_anew(self) -> None:
        """Everybody talks about something else from now on."""
        self._conversations = deque(self._begin() for _ in range(CONVERSATIONS))

    async def ask(self) -> Asked:
        """The next turn. Raises DrillError where it isn't answered."""
        conversation = self._conversations.popleft()
        messages = conversation.messages
        messages.append({"role": "user", "content": words(self._choice, *_WORDS)})
        body: dict[str, Any] = {"messages": list(messages), "max_tokens": _MAX_TOKENS, "temperature": 0}
        reply = await self._client.ask(Ask(CHAT, body), _WHOLE)
        if not reply.is_answered:
            raise DrillError(f"a request was not answered: {reply.error or f'status {reply.status}'}")
        self.asked += 1
        messages.append({"role": "assistant", "content": reply.text})
        is_over = len(messages) > 2 * conversation.turns
        self._conversations.append(self._begin() if is_over else conversation)
        return Asked(
            number=self.asked,
            prompt_tokens=reply.usage["prompt_tokens"],
            cached_tokens=reply.reuse["cached_tokens"],
            achievable_tokens=reply.reuse["achievable_tokens"],
            path=reply.reuse["path"],
        )

    def _begin(self) -> _Conversation:
        system = {"role": "system", "content": words(self._choice, *_WORDS)}
        return _Conversation([system], self._choice.randint(*_TURNS))


@dataclass(frozen=True, slots=True)
class _Conversation:
    """`messages` grows until there are `turns` of them."""

    messages: Messages
    turns: int
