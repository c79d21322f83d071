"""How torch's OpenMP threads wait for one another. It is chosen before torch is loaded: its library reads it then."""

from __future__ import annotations

import os
import sys
from pathlib import Path

SPIN_COUNT = 0
"""Turns of the library's waiting loop before a thread that waits sleeps, where nobody would see that it waits in vain.

Its own default is 300,000: a thread that spins so long uses up the time in which the one it waits for could run, and
beside one busy process a prefill takes a dozen times as long and more. Where the system tells how long threads wait for
a core the default stays, for it is fastest, and `engine.kernels.torch.team` takes a thread away in time.
"""

_COUNT = "GOMP_SPINCOUNT"
_POLICY = "OMP_WAIT_POLICY"


def choose_waiting() -> None:
    """For this process and those that it starts. A user's own choice stays; once torch is there, so does everything."""
    is_free = "torch" not in sys.modules and _COUNT not in os.environ and _POLICY not in os.environ
    if is_free and not can_see_waiting():
        os.environ[_COUNT] = str(SPIN_COUNT)


def can_see_waiting() -> bool:
    """Whether this system tells how long a thread waited for a core, and how long cores were idle: Linux does."""
    return Path("/proc/self/schedstat").is_file() and Path("/proc/stat").is_file()


def threads_spin() -> bool:
    """Whether they wait as the library does by itself: neither this module nor a user has chosen."""
    return _COUNT not in os.environ and _POLICY not in os.environ


def describe_waiting() -> str:
    """What holds in this process, in a few words."""
    if _COUNT in os.environ:
        count = os.environ[_COUNT]
        whose = "chosen here" if count == str(SPIN_COUNT) else f"set by {_COUNT}"
        return f"they spin for {count} turns, then sleep ({whose})"
    if _POLICY in os.environ:
        return f"they wait as {_POLICY}={os.environ[_POLICY]} says"
    if can_see_waiting():
        return "they spin, and are fewer while other programs want their cores"
    return "they spin, as the OpenMP library does by itself: torch was loaded before that could be chosen"
