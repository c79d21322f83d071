"""A real Prometheus as a process of its own, with the shipped configuration, and what it knows."""

from __future__ import annotations

import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx

from tests.programs import needs_program
from tests.waiting import PATIENCE_SECONDS

T = TypeVar("T")
_POLL_SECONDS = 0.1


@dataclass
class PrometheusProcess:
    """Where it answers."""

    url: str

    def ask(self, path: str, **params: str) -> Any:
        """The data of an answer of its API. Raises on anything but success."""
        answer = (
            httpx.get(f"{self.url}/api/v1/{path}", params=params, timeout=PATIENCE_SECONDS).raise_for_status().json()
        )
        assert answer["status"] == "success", answer
        return answer["data"]

    def query(self, expression: str) -> list[Any]:
        """The series that an expression gives at this moment."""
        return self.ask("query", query=expression)["result"]

    def alerts(self) -> list[Any]:
        """Those that are pending or firing."""
        return self.ask("alerts")["alerts"]


@contextmanager
def run_prometheus(config: Path, data: Path) -> Iterator[PrometheusProcess]:
    """Start it on a free port, wait until it listens, and end it at the end."""
    program = needs_program("prometheus", package="prometheus")
    command = [program, f"--config.file={config}", f"--storage.tsdb.path={data}", "--web.listen-address=127.0.0.1:0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    overdue = threading.Timer(PATIENCE_SECONDS, process.kill)
    overdue.start()
    log: list[str] = []
    assert process.stderr is not None
    try:
        address = None
        for line in process.stderr:
            log.append(line)
            address = address or re.search(r'msg="Listening on" address=(\S+)', line)
            if "Server is ready" in line:
                break
        assert address, "".join(log)
        overdue.cancel()
        reader = threading.Thread(target=log.extend, args=(process.stderr,), daemon=True)
        reader.start()
        yield PrometheusProcess(f"http://{address[1]}")
    finally:
        overdue.cancel()
        process.kill()
        process.wait()


def until(found: Callable[[], T], seconds: float = PATIENCE_SECONDS) -> T:
    """What `found` gives as soon as that is something; it fails with the last of it when the time is up.

    Prometheus tells nobody when something changes, so this asks again and again.
    """
    deadline = time.monotonic() + seconds
    while not (result := found()):
        assert time.monotonic() < deadline, result
        time.sleep(_POLL_SECONDS)
    return result
