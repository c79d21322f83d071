"""`dalsegno drill collapse` as a process: the real collapse, noticed and mended, and a drill that is stopped midway."""

from __future__ import annotations

import re
import signal
import subprocess
import sys

import psutil

from tests.waiting import PATIENCE_SECONDS

DRILL = [sys.executable, "-m", "server", "drill", "collapse"]

TIMELINE = (
    "a private daemon with the bundled model and small pools is started",
    "it serves at http://127.0.0.1:",
    "healthy: 10 conversations take turns",
    "the fault leak_host_state is switched on",
    "reuse has collapsed: ",
    "the insight prefix.reuse_collapsed is open",
    "What to do: ",
    "health says so",
    '"status": "degraded"',
    "GET /readyz: 200; GET /readyz?strict=reuse: 503",
    'dalsegno_reuse_state{state="collapsed"} 1.0',
    "the fault is switched off",
    "an audit finds ",
    'POST /admin/cache/reset {"tiers": ["host"]} gives units back: ',
    "reuse is recovering",
    "reuse is healthy",
    "the alarm is over",
    '"status": "ok"',
    "GET /readyz?strict=reuse: 200",
    "passed: found ",
    "the private daemon has ended",
)


def test_a_leak_is_noticed_told_and_mended():
    result = subprocess.run(DRILL, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)
    assert result.returncode == 0, result.stdout
    assert result.stderr == ""
    place = 0
    for expected in TIMELINE:
        place = result.stdout.find(expected, place)
        assert place >= 0, f"{expected!r} is not there, or not in its place:\n{result.stdout}"
    requests = [int(number.replace(",", "")) for number in re.findall(r"s +([\d,]+) requests ", result.stdout)]
    assert requests == sorted(requests)
    assert_ended(result.stdout)


def test_stopped_midway_it_leaves_no_daemon():
    with subprocess.Popen(DRILL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        said = ""
        while "it serves at" not in said:
            said += process.stdout.readline()
        process.send_signal(signal.SIGINT)
        said += process.stdout.read()
        assert process.wait(PATIENCE_SECONDS) == 130
        assert process.stderr.read() == ""
    assert "passed" not in said
    assert_ended(said)


def assert_ended(said):
    (pid,) = re.findall(r", process (\d+)", said)
    assert not psutil.pid_exists(int(pid))
