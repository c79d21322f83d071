"""Talking to an engine in tests, with an account of what it could remember: the longest hit that the design allows."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from cache import Frontier, ReuseReport
from engine.engine import Engine, Generation, GenerationRequest, SamplingParams, Usage
from engine.frontiers import prompt_frontiers
from engine.text.slices import in_one_go
from server.chat import render_prompt

_names = itertools.count()


@dataclass(frozen=True)
class Answer:
    token_ids: list[int]
    usage: Usage
    reuse: ReuseReport


@dataclass
class Talk:
    """One engine, and the prefixes that the requests served so far may have left behind."""

    engine: Engine
    remembered: set[tuple[int, ...]] = field(default_factory=set)

    def request(self, prompt: Sequence[Any], max_tokens: int = 2, **options: Any) -> GenerationRequest:
        """`prompt`: messages, or token ids as they are."""
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens)
        name = f"r{next(_names)}"
        if prompt and isinstance(prompt[0], dict):
            rendered = in_one_go(render_prompt(self.engine, prompt, {}))
            return GenerationRequest(name, rendered.token_ids, sampling, frontiers=rendered.frontiers)
        return GenerationRequest(name, tuple(prompt), sampling, **options)

    async def ask(self, prompt: Sequence[Any], max_tokens: int = 2, **options: Any) -> Answer:
        return await self.serve(self.request(prompt, max_tokens, **options))

    async def serve(self, request: GenerationRequest) -> Answer:
        answer = await collect(self.engine.submit(request))
        self.remember(request, answer)
        return answer

    async def together(self, prompts: Sequence[Sequence[Any]], max_tokens: int = 2) -> list[Answer]:
        return await asyncio.gather(*(self.ask(prompt, max_tokens) for prompt in prompts))

    def remember(self, request: GenerationRequest, answer: Answer) -> None:
        tokens = (*request.prompt_token_ids, *answer.token_ids)
        self.remembered |= {tokens[: f.tokens] for f in prompt_frontiers(request)}
        self.remembered.add(tokens[: len(request.prompt_token_ids) + answer.usage.completion_tokens - 1])

    def best(self, prompt: Sequence[Any]) -> int:
        """The longest hit that the frontiers of former requests allow, if nothing of them was lost."""
        tokens = self.request(prompt).prompt_token_ids
        return max((len(p) for p in self.remembered if len(p) < len(tokens) and tokens[: len(p)] == p), default=0)

    def closure(self, prompt: Sequence[Any]) -> Frontier:
        """The last place before the assistant's turn opens."""
        return prompt_frontiers(self.request(prompt))[-1]

    def held(self) -> list[int]:
        """Units that requests and copies hold: all 0 when nobody is served."""
        snapshot = self.engine.snapshot()
        return [count for pool in (snapshot.kv_pages, snapshot.state_slots) for count in (pool.pinned, pool.in_flight)]


async def collect(generation: Generation) -> Answer:
    token_ids: list[int] = []
    async for delta in generation:
        token_ids += delta.token_ids
    assert delta.usage is not None
    assert delta.reuse is not None
    assert delta.usage.cached_tokens == delta.reuse.cached_tokens
    return Answer(token_ids, delta.usage, delta.reuse)


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def system(content: str) -> dict[str, str]:
    return {"role": "system", "content": content}
