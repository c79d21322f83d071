"""Puts a daemon under load: a closed loop keeps conversations going, an open loop lets them arrive."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

from bench.client import LoadClient, Measurement
from bench.conversations import (
    Conversation,
    Load,
    Material,
    arrivals,
    message,
    plan_conversations,
    prompt_tokens,
)
from engine.progress import Advance


async def run_load(client: LoadClient, load: Load, measurements: list[Measurement], advance: Advance) -> None:
    """Ask everything. Each request that has ended is in `measurements`, also when this is cancelled midway.

    Raises LoadError where no daemon answers at the start.
    """
    run = _Run(client, load, await client.material(), measurements, advance)
    conversations = plan_conversations(load)
    async with asyncio.TaskGroup() as tasks:
        if load.concurrency is not None:
            waiting = iter(conversations)
            for _ in range(load.concurrency):
                tasks.create_task(run.hold_each(waiting))
            return
        started = time.perf_counter()
        for at_seconds, conversation in zip(arrivals(load), conversations, strict=False):
            await asyncio.sleep(started + at_seconds - time.perf_counter())
            tasks.create_task(run.hold(conversation))


class _Run:
    """One load on one daemon."""

    def __init__(
        self, client: LoadClient, load: Load, material: Material, measurements: list[Measurement], advance: Advance
    ) -> None:
        self._client = client
        self._load = load
        self._material = material
        self._measurements = measurements
        self._advance = advance
        self._sampling = {"max_tokens": load.max_tokens, "ignore_eos": True, "temperature": 0}

    async def hold_each(self, conversations: Iterator[Conversation]) -> None:
        """One after the other, from an iterator that others draw from too."""
        for conversation in conversations:
            await self.hold(conversation)

    async def hold(self, conversation: Conversation) -> None:
        """One conversation to its end, or to its first error."""
        if self._load.turns == 1:
            tokens = prompt_tokens(self._load, conversation, self._material)
            await self._ask("/v1/completions", {"prompt": tokens})
            return
        messages: list[dict[str, str]] = []
        for turn in range(conversation.turns):
            text = message(self._load, conversation, turn, self._material)
            messages.append({"role": "user", "content": text})
            answer = await self._ask("/v1/chat/completions", {"messages": messages})
            if answer.error:
                self._advance(conversation.turns - turn - 1)
                return
            messages.append({"role": "assistant", "content": answer.text})

    async def _ask(self, path: str, body: dict[str, Any]) -> Measurement:
        measurement = await self._client.ask(path, body | self._sampling)
        self._measurements.append(measurement)
        self._advance(1)
        return measurement
