"""What the C library keeps of memory that was freed, given back to the system."""

from __future__ import annotations

import ctypes

LARGE_BYTES = 2**18
"""A body from which on what was made of it is worth giving back: tens of times its size, in small pieces."""


def give_back() -> None:
    """Give back all that is free, also between pieces in use: milliseconds, in which other threads run.

    It is glibc's malloc_trim(3); other C libraries have none, and nothing is done there.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
