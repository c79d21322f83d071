"""A daemon of one's own: a process that serves a model on a free port of this machine while it is needed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from engine.errors import EngineError

_SECTIONS = ("SERVER", "ENGINE", "CACHE", "OPS")
_END_SECONDS = 10.0


class PrivateDaemonError(EngineError):
    """The daemon did not come up."""


@dataclass(frozen=True, slots=True)
class PrivateDaemon:
    """Where it answers (without /v1), its process, and what it logs, as long as it serves."""

    url: str
    pid: int
    log: Path


@contextmanager
def private_daemon(
    config_toml: str, *flags: str, environment: Mapping[str, str] | None = None
) -> Iterator[PrivateDaemon]:
    """Serve with a whole configuration, and with flags that no file can give; end the process at the end.

    `environment` is added to that of this process.

    Raises PrivateDaemonError with the daemon's own words when it ends before it serves.
    """
    with tempfile.TemporaryDirectory(prefix="dalsegno-bench-") as folder:
        config, log = Path(folder, "config.toml"), Path(folder, "log")
        config.write_text(config_toml, encoding="utf-8")
        # The file has everything that was resolved; a variable would win over it.
        prefixes = tuple(f"DALSEGNO_{section}_" for section in _SECTIONS)
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}
        command = [sys.executable, "-m", "server", "serve", "--config", str(config), "--port", "0", *flags]
        with log.open("w") as stderr:
            # A session of its own: Ctrl-C ends the load first, and then we end the daemon.
            process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env={**inherited, **(environment or {})},
                start_new_session=True,
            )
        try:
            assert process.stdout is not None
            with process.stdout:
                found = re.search(r"https?://\S+(?=/v1)", process.stdout.readline())
                if found is None:
                    process.wait()
                    raise PrivateDaemonError(f"the daemon did not come up: {_last_line(log)}")
                yield PrivateDaemon(found[0], process.pid, log)
        finally:
            _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    said = [line for line in lines if line.strip()]
    return said[-1].removeprefix("dalsegno: ") if said else "it said nothing"
