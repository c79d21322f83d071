"""Runs the daemon in this process: HTTP from the first moment, the model when it is loaded, and a quiet end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any

import uvicorn
from fastapi import FastAPI

from engine.engine import Engine
from server.app import create_app
from server.daemon import Daemon
from server.door import Door
from server.drill import NO_DRILL, FireDrill
from server.listener import raise_descriptor_limit, url_of
from server.process_end import EndLimit
from server.protocol import DoorConfig
from server.settings import Settings
from server.stdio import announce
from server.trust import is_loopback
from server.version import package_version

_CLOSING_SHARE = 0.2
"""Of the time to end in, what is left for the last step and for connections to carry off the last bytes."""

_SWITCH_SECONDS = 0.0001
"""For how long a thread may keep the interpreter's lock where others want it: a fiftieth of Python's own default. Each
of the engine's operations gives it back and asks for it again, so beside a thread that reads a large body a step of a
hundred of them would wait a hundred times as long as this."""

_KEEP_ALIVE_S = 75
"""How long an idle connection waits for its next request: longer than clients keep it, or they lose a race."""

logger = logging.getLogger("dalsegno.server")


class _Server(uvicorn.Server):
    """Leaves the signals to the runner: uvicorn would end the process by the signal that it caught."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def http_config(app: FastAPI, settings: Settings) -> DoorConfig:
    """How HTTP is spoken, and the door that all connections come through."""
    server = settings.server
    door = Door(
        max_connections=min(server.max_connections, raise_descriptor_limit() // 2),
        header_timeout_s=server.header_timeout_s,
        body_timeout_s=server.body_timeout_s,
    )
    return DoorConfig(
        app,
        door,
        loop="uvloop",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=max(int(settings.server.drain_timeout_s * _CLOSING_SHARE / 2), 1),
    )


def run_daemon(settings: Settings, listener: socket.socket, drill: FireDrill = NO_DRILL) -> None:
    """Serve on `listener` until SIGTERM or SIGINT. Raises what loading the model raises."""
    app = create_app(settings, drill)
    config = http_config(app, settings)
    app.state.daemon.metrics.watch_connections(config.door)
    limit = EndLimit(settings.server.drain_timeout_s)
    with limit.lifted_behind(), _quick_turns(), asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        runner.run(_serve(_Server(config), app.state.daemon, listener, limit))


async def _serve(server: uvicorn.Server, daemon: Daemon, listener: socket.socket, limit: EndLimit) -> None:
    asked_to_stop, hurried = _catch_signals()
    daemon.url = url_of(listener)
    warn_of_open_door(daemon.settings, listener.getsockname())
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, daemon.reopen_logs)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    reason = "error"
    try:
        if await _start(daemon, asked_to_stop, url_of(listener)):
            await _until(serving, asked_to_stop)
            limit.begin()
            await _drain(daemon, hurried)
        reason = "signal"
    finally:
        await daemon.stop(reason)
        server.should_exit = True
        await serving
        gc.unfreeze()


@contextlib.contextmanager
def _quick_turns() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def warn_of_open_door(settings: Settings, address: tuple[str, int]) -> None:
    """Whoever lets in a network without a key, or lets keys learn of each other, is to know it."""
    if not settings.server.api_keys and not is_loopback(address[:2]):
        logger.warning("no key is asked for: everybody who reaches %s may use the model (--api-key)", address[0])
    if settings.has_several_keys and not settings.isolates_keys:
        logger.warning("the holder of one key can find out what another's sent: --cache-isolation is shared")


async def _start(daemon: Daemon, asked_to_stop: asyncio.Event, url: str) -> bool:
    """Load the model; False when a signal came first."""
    started = time.monotonic()
    loading = asyncio.create_task(daemon.start())
    await _until(loading, asked_to_stop)
    if not loading.done():
        loading.cancel()
        return False
    engine = loading.result()
    _keep_collections_short()
    announce(start_up_line(daemon, engine, url, time.monotonic() - started))
    return True


def _keep_collections_short() -> None:
    """Take what was imported and loaded out of the collector's sight, for it stays. A collection stops every thread
    while it looks at each object, which takes 0.2 s for these alone, and a large body brings one about."""
    gc.collect()
    gc.freeze()


async def _drain(daemon: Daemon, hurried: asyncio.Event) -> None:
    seconds = daemon.settings.server.drain_timeout_s * (1 - _CLOSING_SHARE)
    logger.info("draining: no new requests; running ones may take %g s", seconds)
    draining = asyncio.create_task(daemon.drain(seconds))
    await _until(draining, hurried)
    if not draining.done():
        draining.cancel()
        logger.warning("a second signal: running requests end now")
    elif not draining.result():
        logger.warning("%g s are over: running requests end now", seconds)


def start_up_line(daemon: Daemon, engine: Engine, url: str, seconds: float) -> str:
    """What the operator sees once the daemon serves."""
    snapshot = engine.snapshot()
    room = f"{snapshot.kv_pages.capacity:,} KV pages of {engine.page_size} tokens"
    if engine.config.gated_delta_net is not None:
        room += f", {snapshot.state_slots.capacity:,} state slots"
    room += f", {engine.memory.host_bytes // 2**20:,} MiB of host memory"
    fitting = f"{engine.memory.full_contexts:,} conversations of {engine.max_context_tokens:,} tokens fit on the device"
    if engine.memory.host_units:
        fitting += f", {engine.memory.host_full_contexts:,} in host memory"
    return (
        f"dalsegno {package_version()} serves {daemon.model_id} ({engine.config.architecture}) at {url}/v1\n"
        f"  backend {engine.backend_name}, {room}; {fitting}; ready after {seconds:.1f} s"
    )


def _catch_signals() -> tuple[asyncio.Event, asyncio.Event]:
    """Events that the first and the second SIGTERM or SIGINT set."""
    first, second = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, lambda: (second if first.is_set() else first).set())
    return first, second


async def _until(task: asyncio.Task[Any], event: asyncio.Event) -> None:
    """Wait until the task is done or the event is set, whichever comes first."""
    waiting = asyncio.create_task(event.wait())
    try:
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
