"""The daemon as a process of its own, with a tiny model."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import openai
import pytest

from tests.server.conftest import quiet_logging  # noqa: F401  (a fixture)
from tests.server.tiny_model import write_tiny_model
from tests.waiting import PATIENCE_SECONDS

LONG = 50_000
"""Tokens that take minutes: an answer of this length ends only when somebody ends it."""


@dataclass
class DaemonProcess:
    """A running daemon and what it has printed so far."""

    process: subprocess.Popen[str]
    url: str
    log: list[str] = field(default_factory=list)

    def client(self, **options: object) -> openai.OpenAI:
        return openai.OpenAI(
            **{"base_url": f"{self.url}/v1", "api_key": "none", "max_retries": 0, "timeout": PATIENCE_SECONDS} | options
        )

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait_for_log(self, text: str, seconds: float = PATIENCE_SECONDS) -> None:
        """Until a line of standard error holds `text`."""
        with self.has_logged:
            found = self.has_logged.wait_for(lambda: any(text in line for line in self.log), seconds)
        assert found, f"{text!r} is not in the log"

    has_logged: threading.Condition = field(default_factory=threading.Condition)

    def keep_log(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self.has_logged:
                self.log.append(line)
                self.has_logged.notify_all()


@contextmanager
def run_daemon(model: Path, *flags: str) -> Iterator[DaemonProcess]:
    """Start `dalsegno serve` on a free port, wait until it serves, and end it at the end."""
    command = [sys.executable, "-m", "server", "serve", str(model), "--port", "0", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    daemon = DaemonProcess(process, "")
    reader = threading.Thread(target=daemon.keep_log, daemon=True)
    reader.start()
    overdue = threading.Timer(PATIENCE_SECONDS, process.kill)
    overdue.start()
    try:
        assert process.stdout is not None
        found = re.search(r"http://\S+(?=/v1)", process.stdout.readline())
        assert found, "".join(daemon.log)
        overdue.cancel()
        daemon.url = found[0]
        yield daemon
    finally:
        overdue.cancel()
        process.kill()
        process.wait()
        reader.join()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


SMALL = ("--kv-cache-mib", "16", "--host-cache-mib", "16", "--max-context", "60000")


@pytest.fixture(scope="session")
def daemon(tiny_model: Path) -> Iterator[DaemonProcess]:
    """One daemon for every test that doesn't end it. It runs one request at a time, so one left behind is noticed."""
    with run_daemon(tiny_model, *SMALL, "--max-concurrency", "1") as daemon:
        yield daemon
