"""How the process ends: at once when everything is in order, and by a limit when something is not."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Iterator

logger = logging.getLogger("dalsegno.server")


def end_process(code: int) -> None:
    """Write out what is written and end, without Python's own taking apart: of torch's libraries and their memory that
    takes seconds, and everything of ours is closed by now."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


class EndLimit:
    """From `begin` on the process has so long to end in order; then it ends all the same, whatever still holds it: a
    step in the kernels, a client that reads nothing, a thread that cannot be stopped."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._timer = threading.Timer(seconds, self._pass)
        self._timer.daemon = True

    def begin(self) -> None:
        """Harmless when it was begun before."""
        with contextlib.suppress(RuntimeError):
            self._timer.start()

    @contextlib.contextmanager
    def lifted_behind(self) -> Iterator[None]:
        """The block is what has to end."""
        try:
            yield
        finally:
            self._timer.cancel()

    def _pass(self) -> None:
        logger.error("%g s are over and something still holds the process: it ends now", self._seconds)
        end_process(1)
