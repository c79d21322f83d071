"""Ends a command by SIGTERM as Ctrl-C would, so that what it started ends with it."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def sigterm_as_ctrl_c() -> Iterator[None]:
    """A plain SIGTERM would leave a private daemon behind, or the terminal as it was drawn on."""
    before = signal.signal(signal.SIGTERM, lambda _number, _frame: signal.raise_signal(signal.SIGINT))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
