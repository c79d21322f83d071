"""How many threads share torch's operations, by how long they wait for cores; and what Linux tells of that."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field

import pytest

from engine.kernels.torch.team import IDLE_SECONDS, LOOK_SECONDS, Team
from engine.openmp import can_see_waiting
from tests.waiting import PATIENCE_SECONDS

needs_linux = pytest.mark.skipif(not can_see_waiting(), reason="only Linux tells how long a thread waited for a core")


@dataclass
class Machine:
    """A sensor and a clock whose seconds pass when a test says so. Mutable."""

    now: float = 100.0
    waited: float = 7.0
    idle: float = 50.0
    sizes: list[int] = field(default_factory=list)

    def waited_seconds(self) -> float:
        return self.waited

    def idle_seconds(self) -> float:
        return self.idle

    def resize(self, count: int) -> None:
        self.sizes.append(count)

    def works(self, team: Team, seconds: float, *, waits: float = 0.0, idle_cores: float = 0.0) -> None:
        """For so long operations follow one another; the share of time in which threads wait, and cores are idle."""
        ends_at = self.now + seconds
        while self.now < ends_at:
            step = LOOK_SECONDS / 4
            self.now += step
            self.waited += waits * step
            self.idle += idle_cores * step
            team.look()


@pytest.fixture
def machine():
    return Machine()


def team_of(most, machine):
    return Team(most, machine, lambda: machine.now)


def test_a_team_that_nobody_disturbs_stays_as_it_is(machine):
    team = team_of(2, machine)
    machine.works(team, 10, waits=0.1)
    assert (team.count, machine.sizes) == (2, [])


def test_a_thread_that_waits_for_its_core_is_taken_away_within_two_looks(machine):
    team = team_of(2, machine)
    machine.works(team, 1)
    machine.works(team, 2 * LOOK_SECONDS, waits=0.5)
    assert machine.sizes == [1]


@pytest.mark.parametrize(("seconds", "sizes"), [(3.0, [1]), (100.0, [])])
def test_a_wait_counts_by_its_share_of_the_time_since_the_last_look(machine, seconds, sizes):
    """One long operation is enough; in a long pause it is nothing."""
    team = team_of(2, machine)
    machine.waited += 2.0
    machine.now += seconds
    team.look()
    assert machine.sizes == sizes


def test_the_thread_comes_back_when_a_core_is_idle_and_not_before(machine):
    team = team_of(2, machine)
    machine.works(team, 1, waits=0.6)
    machine.works(team, 60, idle_cores=0.3)
    assert machine.sizes == [1]
    machine.works(team, 2 * IDLE_SECONDS, idle_cores=1.0)
    assert machine.sizes == [1, 2]


def test_the_last_thread_stays_however_long_it_waits(machine):
    team = team_of(3, machine)
    machine.works(team, 60, waits=2.0)
    assert machine.sizes == [2, 1]


def test_as_many_come_back_at_once_as_cores_are_idle(machine):
    team = team_of(16, machine)
    machine.works(team, 4 * LOOK_SECONDS, waits=3.0)
    machine.works(team, 2 * LOOK_SECONDS)
    fewer = team.count
    assert fewer < 14
    machine.works(team, 2 * IDLE_SECONDS, idle_cores=16 - fewer)
    assert machine.sizes[-2:] == [fewer, 16]


REPORT = """
import os, time
import torch
from engine.kernels.torch import team
"""


UNTIL_THE_TEAM_IS_SMALLER = """
x = torch.ones(2**20)
while torch.get_num_threads() > 1:
    x.mul_(1.0)
    team.look()
"""


def tells(code, cores):
    """What a process of its own, with two threads on these cores, prints last."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    done = subprocess.run(
        [sys.executable, "-c", REPORT + code],
        env=environment | {"OMP_NUM_THREADS": "2"},
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=True,
    )
    return done.stdout.split()[-1]


@needs_linux
def test_linux_tells_of_threads_that_share_a_core_and_the_team_gets_smaller():
    one = {min(os.sched_getaffinity(0))}
    code = (
        UNTIL_THE_TEAM_IS_SMALLER
        + """
print(torch.get_num_threads())
"""
    )
    assert tells(code, one) == "1"


@needs_linux
def test_a_thread_that_begins_later_gets_the_team_that_it_would_have_had():
    one = {min(os.sched_getaffinity(0))}
    code = (
        UNTIL_THE_TEAM_IS_SMALLER
        + """
import threading
def work():
    team._new_look()
    print(torch.get_num_threads())
thread = threading.Thread(target=work)
thread.start()
thread.join()
"""
    )
    assert tells(code, one) == "2"


@needs_linux
def test_linux_tells_of_cores_that_are_idle():
    code = """
import psutil
def known():
    each = psutil.cpu_times(percpu=True)
    return sum(each[core].idle + each[core].iowait for core in os.sched_getaffinity(0))
sensor = team.LinuxSensor()
agreed = []
for _ in range(5):
    before, found, after = known(), sensor.idle_seconds(), known()
    agreed.append(before - 0.001 <= found <= after + 0.001)
    time.sleep(0.05)
print(all(agreed))
"""
    for cores in ({min(os.sched_getaffinity(0))}, os.sched_getaffinity(0)):
        assert tells(code, cores) == "True"


@needs_linux
def test_a_step_goes_on_where_no_file_can_be_opened_any_more():
    code = """
import resource
sensor = team.LinuxSensor()
resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
for count in (1, 2):
    sensor.resize(count)
print(torch.get_num_threads(), sensor.waited_seconds() >= 0, sep="-")
"""
    assert tells(code, os.sched_getaffinity(0)) == "2-True"


@needs_linux
def test_a_team_that_nobody_can_watch_is_told_of_and_works():
    code = """
import logging, resource
told = []
team.logger.addFilter(lambda record: told.append(record))
resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
for _ in range(3):
    team.look()
print(len(told))
"""
    assert tells(code, os.sched_getaffinity(0)) == "1"
