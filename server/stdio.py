"""Standard output and standard error of a process that outlives whoever reads them."""

from __future__ import annotations

import contextlib
import logging
import os
import sys

logger = logging.getLogger("dalsegno.server")


def occupy_descriptors() -> None:
    """Put `/dev/null` where the parent closed one of the three: the next file or socket would be written to instead."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            # The lowest that is free is taken, which is this one.
            os.open(os.devnull, os.O_RDWR)
    # Python has nothing in the place of what was closed when it began.
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", closefd=False)


def announce(text: str) -> None:
    """Write lines to standard output; where nobody can read them any more, the log says so."""
    try:
        print(text, flush=True)
    except OSError as error:
        logger.warning("standard output cannot be written (%s); the daemon goes on without", error.strerror)
        silence_output()


def silence_output() -> None:
    """Send what is left of standard output nowhere, or Python's own exit would fail on it."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
