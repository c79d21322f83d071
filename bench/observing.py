"""What it costs to be observed: tokens a second with everything on against everything off, in turns on one engine."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.catalog import resolve_model
from engine.engine import Delta, Engine, EngineOptions, GenerationRequest, SamplingParams
from engine.errors import EngineError
from ops.console import Console
from ops.event_json import plain
from ops.event_log import EventLog
from ops.health import Phase
from ops.log import configure_logging
from ops.metrics import Metrics
from ops.operations import Operations, Served

ENDPOINT = "/v1/chat/completions"
STREAMS = 8
PROMPT_TOKENS = 96
SCRAPE_SECONDS = 1.0
"""Fifteen times as often as Prometheus does by default."""
TICK_SECONDS = 1.0
LIMIT = 0.02

Watch = Callable[[Delta], None]


@dataclass(frozen=True, slots=True)
class Pair:
    """Tokens a second of two runs, one right after the other."""

    off: float
    on: float

    @property
    def ratio(self) -> float:
        return self.on / self.off


class Observed:
    """Everything that a daemon has around its engine, but for HTTP: events to a file and to a log, metrics that are
    scraped, insights, the history and the last requests as a dashboard asks for them. Mutable."""

    def __init__(self, engine: Engine, event_log: EventLog) -> None:
        self._engine = engine
        self.metrics = Metrics("bench", [ENDPOINT])
        self.operations = Operations(self.metrics, [Console(), event_log], interval_seconds=1.0)
        served = Served(
            version="bench",
            model=engine.model_folder.name,
            architecture=engine.config.architecture,
            backend=engine.backend_name,
            max_context_tokens=engine.max_context_tokens,
            page_size_tokens=engine.page_size,
            max_concurrency=engine.options.max_concurrency,
            host_unit_bytes=engine.memory.host_unit_bytes,
            startup_seconds=0.0,
        )
        self.operations.started(served, engine.snapshot())
        self.metrics.watch_engine(engine.snapshot, served.model, served.architecture, served.backend)

    async def look(self) -> None:
        """As a daemon, a Prometheus and a dashboard look, until cancelled."""
        operations = self.operations
        while True:
            await asyncio.sleep(min(TICK_SECONDS, SCRAPE_SECONDS))
            health = operations.health(Phase.SERVING, self._engine.heartbeat_age_seconds())
            operations.tick(self._engine.snapshot(), health)
            self.metrics.expose("text/plain")
            [plain(each.sample) for each in operations.history.since()]
            list(operations.requests.newest(50))

    def begin(self, name: str) -> Watch:
        """An answer is in the queue; returns what is to see its deltas."""
        self.operations.request_began(name, ENDPOINT, [name])
        return self.metrics.new_generation()


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench observing", description=__doc__)
    parser.add_argument("model", nargs="?", default="demo", help="a folder, a hub id, or a short name (default demo)")
    parser.add_argument("--rounds", type=int, default=15, help="pairs of runs, after one to warm up (default 15)")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of each of the eight answers (default 128)")
    parser.add_argument("--turns", type=int, default=3, help="requests of each stream in a run (default 3)")
    options = parser.parse_args(arguments)
    try:
        engine = Engine.load(resolve_model(options.model), EngineOptions(max_concurrency=STREAMS))
    except EngineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 3
    with tempfile.TemporaryDirectory(prefix="dalsegno-bench-") as folder, open(os.devnull, "w") as nowhere:
        configure_logging("info", "json", nowhere)
        log = EventLog(str(Path(folder, "events.jsonl")))
        try:
            pairs = asyncio.run(_measure(engine, log, options.rounds, options.turns, options.tokens))
        finally:
            log.close()
            logging.getLogger().handlers.clear()
    return _tell(options.model, pairs)


async def _measure(engine: Engine, log: EventLog, rounds: int, turns: int, tokens: int) -> list[Pair]:
    """Which comes first changes with each round, so that a machine that slows down slows both."""
    await engine.start()
    pairs: list[Pair] = []
    try:
        observed = Observed(engine, log)
        for number in range(rounds + 1):
            found: dict[bool, float] = {}
            for is_on in (False, True) if number % 2 else (True, False):
                async with _observing(engine, observed if is_on else None) as begin:
                    found[is_on] = await _run(engine, f"{number}-{is_on}", turns, tokens, begin)
            if number:
                pairs.append(Pair(off=found[False], on=found[True]))
                print(f"round {number}: {found[False]:8,.0f} off, {found[True]:8,.0f} on", file=sys.stderr)
    finally:
        await engine.stop()
    return pairs


@contextlib.asynccontextmanager
async def _observing(engine: Engine, observed: Observed | None) -> AsyncIterator[Callable[[str], Watch] | None]:
    if observed is None:
        engine.observe(None)
        yield None
        return
    engine.observe(observed.operations.engine_event)
    looking = asyncio.create_task(observed.look())
    try:
        yield observed.begin
    finally:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)


async def _run(engine: Engine, name: str, turns: int, tokens: int, begin: Callable[[str], Watch] | None) -> float:
    """Tokens a second of eight conversations side by side."""
    started = time.perf_counter()
    await asyncio.gather(
        *(_talk(engine, f"{name}-{stream}", stream, turns, tokens, begin) for stream in range(STREAMS))
    )
    return STREAMS * turns * tokens / (time.perf_counter() - started)


async def _talk(
    engine: Engine, name: str, stream: int, turns: int, tokens: int, begin: Callable[[str], Watch] | None
) -> None:
    """Turn after turn of one conversation; the same ones whether observed or not."""
    draw = random.Random(stream)
    history: list[int] = []
    for turn in range(turns):
        history += draw.choices(range(engine.config.vocab_size), k=PROMPT_TOKENS)
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        request = GenerationRequest(f"{name}-{turn}", tuple(history), sampling, namespace=name)
        generation = engine.submit(request)
        watch = None if begin is None else begin(request.request_id)
        async for delta in generation:
            history += delta.token_ids
            if watch is not None:
                watch(delta)


def _tell(model: str, pairs: Sequence[Pair]) -> int:
    """The medians and their spread; 1 where being observed costs more than the limit."""
    ratios = sorted(pair.ratio for pair in pairs)
    median = statistics.median(ratios)
    off, on = statistics.median(pair.off for pair in pairs), statistics.median(pair.on for pair in pairs)
    print(
        f"{model}, {STREAMS} streams, {len(pairs)} pairs: {off:,.0f} tokens/s unobserved, {on:,.0f} observed; ratio "
        f"{median:.4f} "
        f"(from {ratios[0]:.3f} to {ratios[-1]:.3f}), so it costs {100 * (1 - median):.1f} % "
        f"(at most {100 * LIMIT:.0f} % are allowed)"
    )
    return 0 if median >= 1 - LIMIT else 1
