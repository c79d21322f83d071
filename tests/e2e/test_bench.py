"""`dalsegno bench` as a process: against a daemon, with one of its own, and when it is stopped midway."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import psutil
import pytest

from tests.e2e.conftest import SMALL
from tests.waiting import PATIENCE_SECONDS

BENCH = [sys.executable, "-m", "server", "bench"]
FEW = ["--requests", "6", "--prompt-tokens", "40", "--max-tokens", "8", "--concurrency", "2"]


def _summary(*arguments):
    result = subprocess.run([*BENCH, *arguments, "--json", "-"], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)["summary"]


@pytest.mark.parametrize(
    ("flags", "prompt_tokens", "least_cached"),
    [
        (["--seed", "1"], 240, 0),
        (["--seed", "2", "--hit-share", "1"], 240, 5 * 39),
        (["--seed", "3", "--turns", "3"], None, 1),
    ],
    ids=["prompts", "hits", "conversations"],
)
def test_every_request_is_answered_in_full(daemon, flags, prompt_tokens, least_cached):
    summary = _summary("--url", daemon.url, *FEW, *flags)
    assert (summary["requests"], summary["errors"], summary["completion_tokens"]) == (6, {}, 48)
    assert prompt_tokens in (None, summary["prompt_tokens"])
    assert summary["cached_tokens"] >= least_cached
    assert summary["ttft_ms"]["count"] == 6


def test_requests_that_arrive_at_a_rate_are_all_sent(daemon):
    arguments = ["--requests", "6", "--prompt-tokens", "40", "--max-tokens", "8", "--rate", "100", "--seed", "4"]
    assert _summary("--url", daemon.url, *arguments)["completion_tokens"] == 48


def test_errors_are_counted_by_kind(daemon):
    arguments = ["--requests", "2", "--prompt-tokens", "70000"]
    assert _summary("--url", daemon.url, *arguments)["errors"] == {"context_length_exceeded": 2}


def test_stopped_midway_it_tells_what_it_has_and_leaves_no_daemon(tiny_model):
    flags = ["--requests", "100000", "--prompt-tokens", "40", "--max-tokens", "8"]
    process = subprocess.Popen(
        [*BENCH, str(tiny_model), *SMALL, *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert any("asking: " in line for line in process.stderr)  # the line that tells the progress
        (private,) = psutil.Process(process.pid).children()
        process.send_signal(signal.SIGTERM)  # handled as Ctrl-C is
        printed, _ = process.communicate(timeout=PATIENCE_SECONDS)
        assert process.returncode == 130
        assert "tokens/s" in printed
        assert not private.is_running()
    finally:
        process.kill()
        process.wait()
