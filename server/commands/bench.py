"""`dalsegno bench`: puts a daemon under load over HTTP, and says how fast it answered."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from server.commands.interrupts import sigterm_as_ctrl_c
from server.commands.options import api_key_for, with_settings
from server.configuration import ConfigurationError, Resolved, to_toml
from server.settings import ServerSettings

if TYPE_CHECKING:
    from bench.client import Measurement
    from bench.conversations import Load


@with_settings("engine", "cache", model="argument", asks_daemon=True)
def bench(
    resolved: Resolved,
    url: Annotated[
        str | None, typer.Option(help="load a running daemon instead of one of its own", metavar="URL")
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="how many requests to send")] = 64,
    concurrency: Annotated[int | None, typer.Option(min=1, help="closed loop: so many at any time (default 8)")] = None,
    rate: Annotated[float | None, typer.Option(min=1e-6, help="open loop: requests arriving per second")] = None,
    turns: Annotated[int, typer.Option(min=1, help="requests of a conversation; 1: single prompts")] = 1,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="tokens of a prompt, or of each user message")] = 256,
    max_tokens: Annotated[int, typer.Option(min=1, help="tokens of every answer; end tokens are ignored")] = 64,
    hit_share: Annotated[float, typer.Option(min=0, max=1, help="share that begins with a prompt sent before")] = 0.0,
    seed: Annotated[int, typer.Option(help="the same seed asks the same")] = 0,
    json_file: Annotated[
        str | None, typer.Option("--json", help="write the figures there; - is standard output", metavar="FILE")
    ] = None,
) -> None:
    """Send requests, and show time to first token, time between tokens, tokens per second, reuse and errors."""
    from bench.conversations import Load

    if rate is not None and concurrency is not None:
        raise ConfigurationError("--rate and --concurrency were both given; an open loop has no fixed concurrency")
    closed = (concurrency or 8) if rate is None else None
    load = Load(requests, closed, rate, turns, prompt_tokens, max_tokens, hit_share, seed)
    api_key = api_key_for(resolved, url)
    measurements: list[Measurement] = []
    with sigterm_as_ctrl_c(), _daemon(resolved, url) as base:
        try:
            asyncio.run(_measure(base, api_key if url else None, load, measurements))
        finally:
            # Also after Ctrl-C: what was measured so far is worth a look.
            if measurements:
                _show(load, measurements, json_file)


async def _measure(base: str, api_key: str | None, load: Load, measurements: list[Measurement]) -> None:
    from bench.client import LoadClient
    from bench.load import run_load
    from engine.progress import track

    client = LoadClient(base, api_key)
    try:
        with track("asking", load.requests, unit="requests") as advance:
            await run_load(client, load, measurements, advance)
    finally:
        await client.close()


def _show(load: Load, measurements: list[Measurement], json_file: str | None) -> None:
    from rich.console import Console

    from bench.report import render, summarise

    summary = summarise(measurements)
    pace = f"{load.concurrency} at a time" if load.rate is None else f"{load.rate:g} per second"
    title = f"{load.prompt_tokens} + {load.max_tokens} tokens, {pace}"
    Console(highlight=False, stderr=json_file == "-").print(render(title, summary))
    if json_file is None:
        return
    text = json.dumps({"load": asdict(load), "summary": asdict(summary)}, indent=2) + "\n"
    if json_file == "-":
        sys.stdout.write(text)
    else:
        Path(json_file).write_text(text, encoding="utf-8")


@contextlib.contextmanager
def _daemon(resolved: Resolved, url: str | None) -> Iterator[str]:
    """The base URL of who is put under load."""
    if url is not None:
        yield url
        return
    from bench.private_daemon import private_daemon

    settings = resolved.settings
    private = settings.model_copy(update={"server": ServerSettings(model=settings.server.model)})
    with private_daemon(to_toml(private, resolved.origins)) as daemon:
        yield daemon.url
