"""How many threads share torch's operations: as many as it has, fewer while other programs want their cores.

torch's OpenMP threads wait for one another by spinning, which is fastest while each has a core. Where another program
takes one, the threads that spin use up the time in which the one they wait for could run, and a step takes twenty to
ninety times as long. Linux counts for how long each thread was ready to run and had no core (`schedstat` in proc(5)),
so it is seen within milliseconds, in the midst of a step, and the team goes on with a thread fewer. It gets the thread
back when a core has been idle. `python -m bench neighbour` measures both sides; docs/speed.md has the figures.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import BinaryIO, Protocol

import torch

from engine.openmp import can_see_waiting, threads_spin

LOOK_SECONDS = 0.005
"""Between two looks. One takes a microsecond or two; the kernel counts a wait when it ends, after some milliseconds."""

CROWDED = 0.3
"""Of the time, all threads together: beyond it a thread costs the team more by its waits than it does."""

IDLE_SECONDS = 0.1
"""Idle time is looked at over no less than this, for the kernel counts it by hundredths of a second."""

_TASKS = "/proc/self/task"
_STAT = "/proc/stat"
_SCHEDSTAT_BYTES, _LINE_BYTES = 128, 256
_GRAIN = 2**16
"""Elements of which a thread takes its share for itself (at::internal::GRAIN_SIZE is half of it)."""
_IDLE_COLUMNS = (4, 5)
"""idle and iowait; what is stolen from a virtual machine is nobody's."""

logger = logging.getLogger("dalsegno.kernels")


class Sensor(Protocol):
    """What tells how the team fares; seconds, each since a moment of its own."""

    def waited_seconds(self) -> float:
        """For how long threads of the team wanted a core and had none, added up."""

    def idle_seconds(self) -> float:
        """For how long the cores that the process may use had nothing to do, added up."""

    def resize(self, count: int) -> None:
        """There are to be so many threads from now on."""


class Team:
    """The threads that share the operations of one thread, which alone may use it. Mutable."""

    def __init__(self, most: int, sensor: Sensor, clock: Callable[[], float] = time.perf_counter) -> None:
        self._most = self.count = most
        self._sensor, self._clock = sensor, clock
        self._looked_at = clock()
        self._next_look = self._looked_at + LOOK_SECONDS
        self._waited = sensor.waited_seconds()
        self._idle = self._idle_since = 0.0

    def look(self) -> None:
        """To be called between operations; does nothing most times."""
        now = self._clock()
        if now < self._next_look:
            return
        waited = self._sensor.waited_seconds()
        is_crowded = waited - self._waited > CROWDED * (now - self._looked_at)
        self._waited, self._looked_at, self._next_look = waited, now, now + LOOK_SECONDS
        if is_crowded:
            self._resize(max(1, self.count - 1), now)
        elif self.count < self._most and now - self._idle_since >= IDLE_SECONDS:
            idle_cores = (self._sensor.idle_seconds() - self._idle) / (now - self._idle_since)
            self._resize(min(self._most, self.count + round(idle_cores)), now)

    def _resize(self, count: int, now: float) -> None:
        """Have so many threads, and look at the idle time from now on."""
        if count != self.count:
            self.count = count
            self._sensor.resize(count)
            _size.changed(self._most, count)
        if count < self._most:
            self._idle, self._idle_since = self._sensor.idle_seconds(), now


class LinuxSensor:
    """Of the thread that makes it, and of OpenMP's threads that work for it. Mutable: owns open files."""

    def __init__(self) -> None:
        """Raises OSError where the system does not tell."""
        self._cores = [b"cpu%d" % core for core in os.sched_getaffinity(0)]
        self._tick_seconds = 1 / os.sysconf("SC_CLK_TCK")
        self._stat = open(_STAT, "rb", buffering=0)  # noqa: SIM115  (open as long as this is there)
        self._stat_bytes = _LINE_BYTES * ((os.cpu_count() or 1) + 1)
        self._threads: dict[str, BinaryIO] = {}
        self._follow(str(threading.get_native_id()))
        self._meet(torch.get_num_threads())

    def __del__(self) -> None:
        for file in (self._stat, *self._threads.values()):
            file.close()

    def waited_seconds(self) -> float:
        return sum(map(_waited_nanoseconds, self._threads.values())) / 1e9

    def idle_seconds(self) -> float:
        lines = os.pread(self._stat.fileno(), self._stat_bytes, 0).splitlines()
        columns = {name: line.split() for line in lines if (name := line.partition(b" ")[0]) in self._cores}
        return self._tick_seconds * sum(int(line[i]) for line in columns.values() for i in _IDLE_COLUMNS)

    def resize(self, count: int) -> None:
        torch.set_num_threads(count)
        # Where no file can be opened any more, those that are known are looked at, and the step goes on.
        with contextlib.suppress(OSError):
            self._meet(count)

    def _meet(self, count: int) -> None:
        """Whoever is new after an operation that all share is OpenMP's; it ends threads that are too many."""
        before = set(os.listdir(_TASKS))
        torch.ones(count * _GRAIN).mul_(2.0)
        after = set(os.listdir(_TASKS))
        for task in after - before:
            with contextlib.suppress(FileNotFoundError):  # another's, and over already
                self._follow(task)
        for task in self._threads.keys() - after:
            self._threads.pop(task).close()

    def _follow(self, task: str) -> None:
        self._threads[task] = open(f"{_TASKS}/{task}/schedstat", "rb", buffering=0)  # noqa: SIM115


def _waited_nanoseconds(schedstat: BinaryIO) -> int:
    try:
        return int(os.pread(schedstat.fileno(), _SCHEDSTAT_BYTES, 0).split()[1])
    except ProcessLookupError:  # it has ended since
        return 0


class _Size:
    """What torch lets new threads inherit of a team that was made smaller, and what it had been. Mutable."""

    def __init__(self) -> None:
        self.most = self.count = 0

    def of_new_team(self) -> int:
        """How many threads a new one may have."""
        inherited = torch.get_num_threads()
        return self.most if inherited == self.count else inherited

    def changed(self, most: int, count: int) -> None:
        """A team has so many now."""
        self.most, self.count = most, count


_size = _Size()


_own = threading.local()
"""Each thread that computes has a team of its own, from its first look on."""


def look() -> None:
    """See to the team of the thread that calls this, as `Team.look` does."""
    try:
        own: Callable[[], None] = _own.look
    except AttributeError:
        own = _own.look = _new_look()
    own()


def _new_look() -> Callable[[], None]:
    most = _size.of_new_team()
    if most > 1 and threads_spin() and can_see_waiting():
        torch.set_num_threads(most)
        try:
            return Team(most, LinuxSensor()).look
        except OSError as error:
            logger.warning("threads spin, and nobody sees whether they wait for cores: %s", error)
    return _do_nothing


def _do_nothing() -> None:
    pass
