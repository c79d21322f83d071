"""`dalsegno watch` beside real daemons: one that is well, and one whose reuse has collapsed and that goes away."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from contextlib import contextmanager

import httpx
import pytest

from tests.e2e.conftest import SMALL, run_daemon
from tests.waiting import PATIENCE_SECONDS

WATCH = [sys.executable, "-m", "server", "watch"]
KEYS = ("--api-key", "client", "--admin-key", "operator")
PROMPT = {"prompt": "the same again and again " * 10, "max_tokens": 2, "temperature": 0}


def ask(url, times):
    for _ in range(times):
        httpx.post(f"{url}/v1/completions", json=PROMPT, timeout=PATIENCE_SECONDS).raise_for_status()


def look(url, *flags):
    return subprocess.run(
        [*WATCH, url, "--once", *flags], capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
    )


def test_a_daemon_that_is_well(daemon):
    ask(daemon.url, 2)
    seen = look(daemon.url)
    assert (seen.returncode, seen.stderr) == (0, "")
    for expected in ("HEALTHY", "device kv pages", "device state slots", "paths", "last requests", "length"):
        assert expected in seen.stdout
    assert "answered" not in seen.stdout  # every door is there
    assert "closed" not in seen.stdout
    assert "another version" not in seen.stdout
    raw = json.loads(look(daemon.url, "--json").stdout)
    assert raw["health"]["reuse"] == "healthy"
    assert raw["closed"] == raw["missing"] == {}
    assert {"insights", "cache", "history", "requests", "metrics"} <= set(raw)


@pytest.fixture(scope="module")
def collapsed(tiny_model):
    """A daemon that has stopped to remember, and has noticed."""
    with run_daemon(tiny_model, *SMALL, "--allow-faults", "--fault", "refuse_publish", *KEYS) as daemon:
        with httpx.Client(headers={"x-api-key": "client"}, base_url=daemon.url, timeout=PATIENCE_SECONDS) as client:
            while client.get("/health").json()["reuse"] != "collapsed":
                client.post("/v1/completions", json=PROMPT).raise_for_status()
            while not client.get("/insights").json()["insights"]:
                pass
        yield daemon


def test_a_daemon_whose_reuse_has_collapsed(collapsed):
    seen = look(collapsed.url, *KEYS)
    assert (seen.returncode, seen.stderr) == (1, "")
    for expected in ("DEGRADED", "prefix.reuse_collapsed", "What to do: ", "last requests"):
        assert expected in seen.stdout


def test_who_holds_no_key_still_sees_that_something_is_wrong(collapsed):
    as_client, as_nobody = look(collapsed.url, "--api-key", "client"), look(collapsed.url)
    assert as_client.returncode == as_nobody.returncode == 1
    assert "prefix.reuse_collapsed" in as_client.stdout
    assert "/admin closed: --admin-key" in as_client.stdout
    assert "last requests" not in as_client.stdout
    assert "/insights and /metrics closed: --api-key" in as_nobody.stdout


def test_a_live_view_outlives_its_daemon(collapsed, tiny_model):
    with live_view(collapsed.url) as view:
        view.read_until("DEGRADED")
        collapsed.process.kill()
        view.read_until("NO ANSWER")
        collapsed.process.wait()
        with run_daemon(tiny_model, *SMALL, "--port", collapsed.url.rpartition(":")[2]):
            view.read_until("HEALTHY")
        view.process.send_signal(signal.SIGINT)
        assert view.process.wait(PATIENCE_SECONDS) == 0
        assert view.read_until("\x1b[?1049l")


class LiveView:
    """The watcher on a terminal of its own."""

    def __init__(self, process, terminal):
        self.process = process
        self._terminal = terminal

    def read_until(self, text):
        """What has been written since the last call, up to `text`."""
        page = ""
        while text not in page:
            page += os.read(self._terminal, 65536).decode(errors="replace")
        return page


@contextmanager
def live_view(url):
    ours, theirs = pty.openpty()
    command = [*WATCH, url, "--interval-s", "0.2"]
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, env=environment) as process:
        os.close(theirs)
        try:
            yield LiveView(process, ours)
        finally:
            process.kill()
            os.close(ours)
