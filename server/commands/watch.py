"""`dalsegno watch`: the dashboard in a terminal, and the health of a daemon as an exit code."""

from __future__ import annotations

import asyncio
import json
import sys
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from server.commands.interrupts import sigterm_as_ctrl_c
from server.configuration import ConfigurationError, resolve
from server.settings import Settings

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

    from server.watch.source import DaemonSource, Keys

_LEAST_INTERVAL_SECONDS = 0.2
_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}


class WatchExit(IntEnum):
    """What `watch --once` found, by the `status` of /health."""

    HEALTHY = 0
    DEGRADED = 1
    NOT_SERVING = 2
    """Unreachable, starting, draining or unavailable."""


def watch(
    url: Annotated[
        str | None,
        typer.Argument(
            metavar="[URL]", help="the daemon", show_default="server.host and server.port: http://127.0.0.1:8000"
        ),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(help="opens insights and metrics; @FILE reads it [server.api_keys]", metavar="KEY")
    ] = None,
    admin_key: Annotated[
        str | None,
        typer.Option(help="opens pools, requests and history; @FILE reads it [server.admin_key]", metavar="KEY"),
    ] = None,
    interval_s: Annotated[
        float, typer.Option(min=_LEAST_INTERVAL_SECONDS, help="seconds between two looks", metavar="SECONDS")
    ] = 2.0,
    once: Annotated[
        bool, typer.Option("--once", help="look once; exit code 0 healthy, 1 degraded, 2 not serving")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="with --once: everything as one JSON object")] = False,
    config: Annotated[
        Path | None, typer.Option(help="TOML file with settings, see config.example.toml", metavar="FILE")
    ] = None,
) -> None:
    """Show the health, insights, pools, reuse and last requests of a running daemon. Ctrl-C ends it."""
    if as_json and not once:
        raise ConfigurationError("--json was given without --once; a live view is for people")
    flags = {"server.api_keys": [api_key] if api_key else None, "server.admin_key": admin_key}
    settings = resolve({name: value for name, value in flags.items() if value}, config_file=config).settings
    from server.commands.consoles import standard_output
    from server.watch.source import DaemonSource

    source = DaemonSource(url or _own_url(settings), _keys(settings))
    console = standard_output()
    with sigterm_as_ctrl_c():
        if once:
            raise typer.Exit(asyncio.run(_look_once(source, console, as_json)))
        try:
            asyncio.run(_look_on(source, console, interval_s))
        except KeyboardInterrupt:
            raise typer.Exit(0) from None


async def _look_once(source: DaemonSource, console: Console, as_json: bool) -> WatchExit:
    from server.watch.screen import Screen
    from server.watch.source import UnreachableError
    from server.watch.view import Watch

    try:
        reading = await source.read()
    except UnreachableError as error:
        if as_json:
            print(json.dumps({"url": source.url, "error": str(error)}))
        else:
            print(f"dalsegno: {error}", file=sys.stderr)
        return WatchExit.NOT_SERVING
    finally:
        await source.close()
    if as_json:
        print(json.dumps(reading.as_json(), indent=2))
    else:
        watch = Watch()
        watch.saw(reading)
        console.print(Screen(watch, source.url))
    return exit_of(reading.health.status)


def exit_of(status: str) -> WatchExit:
    """By the `status` of /health."""
    known = {"ok": WatchExit.HEALTHY, "degraded": WatchExit.DEGRADED}
    return known.get(status, WatchExit.NOT_SERVING)


async def _look_on(source: DaemonSource, console: Console, interval_seconds: float) -> None:
    """Until somebody ends it."""
    from rich.live import Live

    try:
        if not console.is_terminal or console.is_dumb_terminal:
            await _refresh(source, console, None, interval_seconds)
            return
        with Live(console=console, screen=True, auto_refresh=False) as live:
            await _refresh(source, console, live, interval_seconds)
    finally:
        await source.close()


async def _refresh(source: DaemonSource, console: Console, live: Live | None, interval_seconds: float) -> None:
    from server.watch.screen import Screen
    from server.watch.source import UnreachableError
    from server.watch.view import Watch

    watch = Watch()
    clock = asyncio.get_running_loop().time
    if live is not None:
        live.update(Screen(watch, source.url, fits_window=True), refresh=True)
    while True:
        began, trouble = clock(), ""
        try:
            watch.saw(await source.read(watch.newest_unix_ms))
        except UnreachableError as error:
            trouble = str(error)
        screen = Screen(watch, source.url, trouble, fits_window=live is not None)
        if live is None:
            console.print(screen)
            console.print()
        else:
            live.update(screen, refresh=True)
        await asyncio.sleep(max(0.0, began + interval_seconds - clock()))


def _own_url(settings: Settings) -> str:
    """Where a daemon with these settings would answer."""
    host = _EVERYWHERE.get(settings.server.host, settings.server.host)
    return f"http://{f'[{host}]' if ':' in host else host}:{settings.server.port}"


def _keys(settings: Settings) -> Keys:
    from server.watch.source import Keys

    keys, admin = settings.server.api_keys, settings.server.admin_key.get_secret_value()
    return Keys(keys[0].get_secret_value() if keys else None, admin or None)
