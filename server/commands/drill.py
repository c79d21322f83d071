"""`dalsegno drill`: a private daemon is made to fail on purpose, to see that the failure is noticed and mended."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from server.commands.interrupts import sigterm_as_ctrl_c
from server.configuration import resolve, to_toml
from server.exit_codes import ExitCode

if TYPE_CHECKING:
    from rich.console import Console

    from bench.drill.collapse import DrillFault
    from bench.drill.timeline import Moment, Timeline
    from bench.private_daemon import PrivateDaemon

app = typer.Typer(no_args_is_help=True)

_TELL_SECONDS = 5.0
_STYLES = {"note": "dim", "well": "green", "fault": "magenta", "alarm": "yellow", "heal": "cyan", "failed": "bold red"}


@app.callback()
def drills() -> None:
    """Fire drills: a daemon of their own is made to fail, and is watched noticing it and mending."""


@app.command("collapse")
def collapse(
    fault: Annotated[
        Literal["leak_host_state", "refuse_publish"], typer.Option(help="what is made to fail")
    ] = "leak_host_state",
) -> None:
    """Break reuse in a private daemon, and show a timeline of detection, alarm and healing.

    Its daemon serves the bundled model on a free port, and ends with the drill.

    A daemon that serves others is never drilled: there is no --url.

    Exit code 0: everything was noticed and mended in time. 1: the last lines say what was not.
    """
    from bench.drill.collapse import DrillFault
    from server.commands.consoles import standard_output

    with sigterm_as_ctrl_c():
        failures = _hold(DrillFault(fault), standard_output())
    if failures:
        raise typer.Exit(ExitCode.FAILED)


def _hold(fault: DrillFault, console: Console) -> list[str]:
    """What did not happen."""
    from bench.drill.collapse import ENVIRONMENT, FLAGS, SETTINGS
    from bench.drill.timeline import Mark, Timeline
    from bench.private_daemon import private_daemon

    resolved = resolve(SETTINGS, environ={})
    with _printing(console) as printer:
        timeline = Timeline(printer.moment)
        timeline.add(Mark.NOTE, "a private daemon with the bundled model and small pools is started")
        printer.show("it loads its model")
        with private_daemon(to_toml(resolved.settings, resolved.origins), *FLAGS, environment=ENVIRONMENT) as daemon:
            asyncio.run(_run(daemon, fault, timeline, printer.show))
        timeline.add(Mark.NOTE, "the private daemon has ended")
    if timeline.failures:
        console.print(f"failed, {len(timeline.failures)} of what was expected did not happen:", style="bold red")
        for line in timeline.failures:
            print(f"- {line}", flush=True)
    return timeline.failures


async def _run(daemon: PrivateDaemon, fault: DrillFault, timeline: Timeline, show: Callable[[str], None]) -> None:
    import httpx

    from bench.drill.collapse import CollapseDrill
    from bench.drill.timeline import Mark
    from bench.drill.traffic import DrillError
    from bench.soak.client import SoakClient

    client = SoakClient(daemon.url, "drill")
    try:
        timeline.add(Mark.NOTE, f"it serves at {daemon.url}, process {daemon.pid}")
        await CollapseDrill(client, timeline, show).run(fault)
    except (DrillError, httpx.HTTPError) as error:
        timeline.expect(False, f"the drill could not go on: {str(error) or type(error).__name__}")
    finally:
        await client.close()


class _Printer:
    """Prints moments as they come, and between them what is going on: on a terminal in the last line, in a log now and
    then. Mutable."""

    def __init__(self, console: Console, set_last_line: Callable[[str], None] | None) -> None:
        self._console = console
        self._set_last_line = set_last_line
        self._told_at = time.monotonic()

    def moment(self, moment: Moment) -> None:
        """In a log one line for each thing that is said, however long; on a terminal beside its time."""
        from rich.table import Table
        from rich.text import Text

        style = _STYLES[moment.mark]
        at = f"{moment.seconds:>7.1f} s {moment.requests:>5,} requests"
        self._told_at = time.monotonic()
        if self._set_last_line is None:
            print(
                f"{at}  {moment.mark:<7} {moment.what}",
                *(f"    {line}" for line in moment.details),
                sep="\n",
                flush=True,
            )
            return
        row = Table.grid(padding=(0, 2, 0, 0))
        row.add_column(no_wrap=True)
        row.add_column(no_wrap=True, width=len("failed"))
        row.add_column(overflow="fold")
        row.add_row(Text(at, "dim"), Text(moment.mark, style), Text(moment.what, style))
        for line in moment.details:
            row.add_row("", "", Text(line))
        self._console.print(row)

    def show(self, what: str) -> None:
        from rich.markup import escape

        if self._set_last_line is not None:
            self._set_last_line(escape(what))
        elif time.monotonic() - self._told_at >= _TELL_SECONDS:
            print(what, flush=True)
            self._told_at = time.monotonic()


@contextlib.contextmanager
def _printing(console: Console) -> Iterator[_Printer]:
    if not console.is_terminal or console.is_dumb_terminal:
        yield _Printer(console, None)
        return
    with console.status("", spinner="line") as status:
        yield _Printer(console, status.update)
