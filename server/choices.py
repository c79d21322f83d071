"""Several answers to one request: submitted together, read as they come, left together, and counted as one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

from engine.engine import Engine, Generation, SamplingParams
from engine.errors import RequestError
from engine.turns import kept_places
from server.chat import Piece, Prompt, submit
from server.errors import ApiError
from server.schema.usage import (
    CompletionTokensDetails,
    Cost,
    PromptTokensDetails,
    Reuse,
    ReuseSource,
    TimingsBody,
    UsageBody,
)

_SEED_STEP = 0x9E3779B97F4A7C15
"""2**64 over the golden ratio: neighbouring choices get far apart seeds."""


def sampling_of_choice(sampling: SamplingParams, index: int) -> SamplingParams:
    """A seed of its own for each choice; the first has the request's. Without a seed every choice draws one."""
    if sampling.seed is None or index == 0:
        return sampling
    return replace(sampling, seed=(sampling.seed + index * _SEED_STEP) % 2**63)


async def submit_all(
    engine: Engine,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    choices: int,
    answer_id: str,
    param: str,
    namespace: str = "",
    client: str = "",
) -> list[Generation]:
    """Queue `choices` answers to each prompt, in order; all of them or none. `param` is the prompt's field.

    Each counts as a request of `client`. Raises ApiError (400) for more than one client can ever have here, else what
    `submit` raises.
    """
    count = len(prompts) * choices
    pending = engine.options.max_pending_requests
    most = engine.options.max_concurrency + pending - kept_places(pending)
    if count > most:
        raise ApiError(
            400,
            f"the request asks for {count} answers; at most {most} can run and wait here",
            param="n" if choices > 1 else param,
            code="invalid_value",
        )
    generations: list[Generation] = []
    try:
        for prompt in prompts:
            for choice in range(choices):
                request_id = f"{answer_id}-{len(generations)}" if count > 1 else answer_id
                params = sampling_of_choice(sampling, choice)
                generations.append(submit(engine, prompt, params, request_id, param, namespace, client))
    except RequestError:
        for generation in generations:
            await generation.aclose()
        raise
    return generations


async def interleaved(answers: Sequence[AsyncGenerator[Piece, None]]) -> AsyncGenerator[tuple[int, Piece], None]:
    """The pieces of all answers as they come, each with its answer's index; leaving the iteration leaves them all.

    A slow reader makes pieces merge, so that no more than one of each answer waits here.
    """
    if len(answers) == 1:
        async with contextlib.aclosing(answers[0]) as answer:
            async for piece in answer:
                yield 0, piece
        return
    queue: asyncio.Queue[tuple[int, Piece] | Exception | None] = asyncio.Queue(1)

    async def forward(index: int, answer: AsyncGenerator[Piece, None]) -> None:
        try:
            async with contextlib.aclosing(answer):
                async for piece in answer:
                    await queue.put((index, piece))
        except Exception as error:  # noqa: BLE001 - it is raised where the pieces are read
            await queue.put(error)
        else:
            await queue.put(None)

    tasks = [asyncio.create_task(forward(index, answer)) for index, answer in enumerate(answers)]
    try:
        ended = 0
        while ended < len(tasks):
            item = await queue.get()
            if item is None:
                ended += 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for answer in answers:
            await answer.aclose()


def total_cost(costs: Sequence[Cost], choices: int) -> Cost:
    """Of all answers, `choices` to each prompt in order: a prompt counts once, as OpenAI counts it; times overlap."""
    if len(costs) == 1:
        return costs[0]
    firsts = costs[::choices]
    prompt_tokens = sum(cost.usage.prompt_tokens for cost in firsts)
    completion_tokens = sum(cost.usage.completion_tokens for cost in costs)
    reasoning = sum(cost.usage.completion_tokens_details.reasoning_tokens for cost in costs)
    cached = sum(cost.usage.prompt_tokens_details.cached_tokens for cost in firsts)
    prompt_ms = max(cost.timings.prompt_ms for cost in costs)
    predicted_ms = max(cost.timings.predicted_ms for cost in costs)
    return Cost(
        usage=UsageBody(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
            completion_tokens_details=CompletionTokensDetails(reasoning_tokens=reasoning),
        ),
        timings=TimingsBody(
            cache_n=cached,
            prompt_n=prompt_tokens - cached,
            prompt_ms=prompt_ms,
            prompt_per_second=_per_second(prompt_tokens - cached, prompt_ms),
            predicted_n=completion_tokens,
            predicted_ms=predicted_ms,
            predicted_per_second=_per_second(completion_tokens, predicted_ms),
            queue_ms=max(cost.timings.queue_ms for cost in costs),
            restore_ms=max(cost.timings.restore_ms for cost in costs),
            stalled_ms=max(cost.timings.stalled_ms for cost in costs),
            preempted_ms=max(cost.timings.preempted_ms for cost in costs),
        ),
        reuse=_total_reuse([cost.reuse for cost in firsts]),
    )


def _total_reuse(parts: Sequence[Reuse]) -> Reuse:
    """Tokens add up; the path is the first prompt's."""
    return Reuse(
        path=parts[0].path,
        prompt_tokens=sum(part.prompt_tokens for part in parts),
        cached_tokens=sum(part.cached_tokens for part in parts),
        achievable_tokens=sum(part.achievable_tokens for part in parts),
        source=ReuseSource(
            device=sum(part.source.device for part in parts),
            host=sum(part.source.host for part in parts),
            disk=sum(part.source.disk for part in parts),
        ),
        lost={
            reason: sum(part.lost.get(reason, 0) for part in parts)
            for reason in dict.fromkeys(reason for part in parts for reason in part.lost)
        },
    )


def _per_second(tokens: int, milliseconds: float) -> float:
    return round(tokens / milliseconds * 1000, 3) if milliseconds > 0 else 0.0
