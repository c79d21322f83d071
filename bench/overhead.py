"""The engine's own work in a decode step: everything outside the kernels, as a share of the whole step."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import itertools
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.catalog import resolve_model
from engine.engine import Engine, EngineOptions, GenerationRequest, SamplingParams
from engine.errors import EngineError

BATCHES = (1, 8)
PROMPT_TOKENS = 64


class Stopwatch:
    """Times what the runner calls of a model and its kernels. Mutable: the engine's thread writes it."""

    def __init__(self, engine: Engine) -> None:
        runner: Any = engine._loop._runner
        self.steps: list[tuple[int, float, float]] = []
        """Tokens of each step, seconds inside the kernels, and when its sampling ended."""
        self._tokens = 0
        self._seconds = 0.0
        model = runner._model
        runner._model = dataclasses.replace(
            model, forward=self._timed(model.forward, begins=True), logits=self._timed(model.logits)
        )
        runner._kernels.sample = self._timed(runner._kernels.sample, ends=True)

    def _timed(self, work: Callable[..., Any], *, begins: bool = False, ends: bool = False) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            started = time.perf_counter()
            result = work(*arguments)
            ended = time.perf_counter()
            if begins:
                self._tokens, self._seconds = len(arguments[-1]), 0.0
            self._seconds += ended - started
            if ends:
                self.steps.append((self._tokens, self._seconds, ended))
            return result

        return run


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench overhead", description=__doc__)
    parser.add_argument("model", help="a folder, a hub id, or a short name")
    parser.add_argument("--steps", type=int, default=128, help="decode steps to measure at each batch (default 128)")
    options = parser.parse_args(arguments)
    try:
        engine = Engine.load(resolve_model(options.model), EngineOptions(max_concurrency=max(BATCHES)))
    except EngineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 3
    asyncio.run(_measure(engine, options.steps))
    return 0


async def _measure(engine: Engine, num_steps: int) -> None:
    stopwatch = Stopwatch(engine)
    await engine.start()
    try:
        for batch in BATCHES:
            stopwatch.steps.clear()
            await asyncio.gather(*(_answer(engine, f"{batch}-{i}", num_steps) for i in range(batch)))
            own, whole = own_and_whole_seconds(stopwatch.steps, batch)
            print(
                f"{Path(engine.model_folder).name}, decode, batch {batch}: {1e3 * whole:.2f} ms a step, "
                f"{1e3 * own:.2f} ms of them the engine's own ({100 * own / whole:.1f} %)"
            )
    finally:
        await engine.stop()


def own_and_whole_seconds(steps: list[tuple[int, float, float]], batch: int) -> tuple[float, float]:
    """Medians over the decode steps of `batch` tokens that follow on one another: outside the kernels, and whole."""
    pairs = [
        (end - previous_end - inside, end - previous_end)
        for (previous_tokens, _, previous_end), (tokens, inside, end) in itertools.pairwise(steps)
        if previous_tokens == tokens == batch
    ]
    if not pairs:
        raise ValueError(f"no two decode steps of {batch} tokens followed on one another; give more --steps")
    return statistics.median(own for own, _ in pairs), statistics.median(whole for _, whole in pairs)


async def _answer(engine: Engine, request_id: str, num_steps: int) -> None:
    prompt = tuple(random.Random(request_id).choices(range(engine.config.vocab_size), k=PROMPT_TOKENS))
    sampling = SamplingParams(temperature=0, max_tokens=num_steps, ignore_eos=True)
    async for _ in engine.submit(GenerationRequest(request_id, prompt, sampling)):
        pass
