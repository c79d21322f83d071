"""Standard output as rich writes it: coloured on a terminal, plain and wide in a file."""

from __future__ import annotations

import io
import os
import sys

from rich.console import Console

_FILE_COLUMNS = 120


def standard_output() -> Console:
    """A console whose text is not searched for things to colour."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without Unicode still shows the rest
    is_file = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(highlight=False, width=_FILE_COLUMNS if is_file else None)
