"""Progress of long work: a bar on a terminal, a line every few seconds in a log."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

_LOG_INTERVAL_SECONDS = 5.0

logger = logging.getLogger("dalsegno.progress")

Advance = Callable[[float], None]


@contextmanager
def track(description: str, total: float, *, unit: str = "bytes") -> Iterator[Advance]:
    """Yield a function to call with the amount just done, in `unit`s; bar or lines go to standard error."""
    if sys.stderr.isatty():
        amount = (
            (DownloadColumn(), TransferSpeedColumn()) if unit == "bytes" else (MofNCompleteColumn(), TextColumn(unit))
        )
        columns = (TextColumn("{task.description}"), BarColumn(), *amount, TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True)) as progress:
            task = progress.add_task(description, total=total)
            yield lambda done: progress.advance(task, done)
        return
    yield _log_lines(description, total, unit)


def _log_lines(description: str, total: float, unit: str) -> Advance:
    started = last = time.monotonic()
    done = 0.0

    def advance(amount: float) -> None:
        nonlocal done, last
        done += amount
        now = time.monotonic()
        if now - last < _LOG_INTERVAL_SECONDS and done < total:
            return
        last = now
        rate = done / max(now - started, 1e-9)
        share = 100 * done / total if total else 100.0
        logger.info("%s: %.0f of %.0f %s (%.0f %%), %.3g %s/s", description, done, total, unit, share, rate, unit)

    return advance
