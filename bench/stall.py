"""How long running streams stop when a long prompt arrives, against the time of one of its prefill segments."""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from itertools import pairwise

from bench.overhead import Stopwatch
from engine.catalog import resolve_model
from engine.engine import Engine, EngineOptions, GenerationRequest, SamplingParams
from engine.errors import EngineError

STREAMS = 8
STREAM_TOKENS = 160
TOKENS_BEFORE = 32
"""What the first stream has answered when the long prompt arrives."""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench stall", description=__doc__)
    parser.add_argument("model", help="a folder, a hub id, or a short name")
    parser.add_argument("--prompt-tokens", type=int, default=4000, help="length of the long prompt (default 4000)")
    options = parser.parse_args(arguments)
    try:
        engine = Engine.load(resolve_model(options.model), EngineOptions(max_concurrency=STREAMS + 1))
    except EngineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 3
    asyncio.run(_measure(engine, options.prompt_tokens))
    return 0


async def _measure(engine: Engine, prompt_tokens: int) -> None:
    steps = Stopwatch(engine).steps
    await engine.start()
    has_begun = asyncio.Event()
    try:
        streams = [asyncio.create_task(_token_times(engine, i, has_begun)) for i in range(STREAMS)]
        await has_begun.wait()
        arrived_at = time.perf_counter()
        await _answer_long(engine, prompt_tokens)
        answered_at = time.perf_counter()
        times = await asyncio.gather(*streams)
    finally:
        await engine.stop()
    seconds = [
        end - previous_end
        for (_, _, previous_end), (tokens, _, end) in pairwise(steps)
        if tokens > STREAMS and arrived_at < end <= answered_at
    ]
    segment = statistics.median(seconds)
    gap = max(b - a for each in times for a, b in pairwise(each) if b > arrived_at and a < answered_at)
    print(
        f"{engine.model_folder.name}, {STREAMS} streams, a prompt of {prompt_tokens:,} tokens: longest gap "
        f"{1e3 * gap:.0f} ms, {gap / segment:.2f} of a segment ({1e3 * segment:.0f} ms, {len(seconds)} of them, "
        f"longest {1e3 * max(seconds):.0f} ms)"
    )


async def _token_times(engine: Engine, number: int, has_begun: asyncio.Event) -> list[float]:
    """When each piece of a stream reached its consumer; tokens without text yet count too."""
    times: list[float] = []
    async for _ in engine.submit(_request(engine, f"stream {number}", 64, STREAM_TOKENS)):
        times.append(time.perf_counter())
        if number == 0 and len(times) == TOKENS_BEFORE:
            has_begun.set()
    return times


async def _answer_long(engine: Engine, prompt_tokens: int) -> None:
    async for _ in engine.submit(_request(engine, "long", prompt_tokens, 1)):
        pass


def _request(engine: Engine, name: str, prompt_tokens: int, max_tokens: int) -> GenerationRequest:
    prompt = tuple(random.Random(name).choices(range(engine.config.vocab_size), k=prompt_tokens))
    return GenerationRequest(name, prompt, SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True))
