"""How torch's OpenMP threads wait for one another. It is chosen before torch is loaded: its library reads it then."""

from __future__ import annotations

import os
import sys

SPIN_COUNT = 0
"""Turns of the library's waiting loop before a thread that waits goes to sleep.

Its own default is 300,000: a thread that spins so long uses up the time in which the one it waits for could run, and
beside one busy process a prefill takes a dozen times as long. To spin a little costs as much alone as not to spin, and
more beside a process. `python -m bench neighbour` measures both; docs/speed.md has the figures.
"""

_COUNT = "GOMP_SPINCOUNT"
_POLICY = "OMP_WAIT_POLICY"


def choose_waiting() -> None:
    """For this process and those that it starts. A user's own choice stays; once torch is there, so does everything."""
    if "torch" not in sys.modules and _COUNT not in os.environ and _POLICY not in os.environ:
        os.environ[_COUNT] = str(SPIN_COUNT)


def describe_waiting() -> str:
    """What holds in this process, in a few words."""
    if _COUNT in os.environ:
        count = os.environ[_COUNT]
        whose = "chosen here" if count == str(SPIN_COUNT) else f"set by {_COUNT}"
        return f"they spin for {count} turns, then sleep ({whose})"
    if _POLICY in os.environ:
        return f"they wait as {_POLICY}={os.environ[_POLICY]} says"
    return "they wait as the OpenMP library does by itself: torch was loaded before that could be chosen"
