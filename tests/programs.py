"""Programs that the tests drive and no Python package brings: found, or the test skips; never in CI."""

from __future__ import annotations

import os
import shutil
import socket
import warnings

import pytest


def is_ci() -> bool:
    """Whether the tests run where a missing program is a failure: CI says so in the variable `CI`."""
    return os.environ.get("CI", "").lower() not in {"", "0", "false"}


def needs_program(name: str, *, package: str) -> str:
    """The path of the program `name`, which Debian ships in `package`.

    Where it is missing, the test that calls this skips and says what to install; in CI, which installs it, it fails.
    Call it from a test or a fixture.
    """
    path = shutil.which(name)
    if path is None:
        message = f"{name} is missing: install it with `apt-get install {package}`"
        if is_ci():
            pytest.fail(message)
        warnings.warn(f"tests are SKIPPED: {message}", stacklevel=2)
        pytest.skip(message)
    return path


def free_port() -> int:
    """A port of this machine for a program that cannot choose one by itself; nobody listens there at this moment."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
        return port
