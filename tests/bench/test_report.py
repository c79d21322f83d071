"""A report's figures are those of the measurements, and nothing that failed counts as speed."""

from __future__ import annotations

import io
import json
from dataclasses import asdict

import pytest
from rich.console import Console

from bench.client import Measurement
from bench.report import Quantiles, render, summarise


def _answered(started_at, pieces, cached_tokens=0):
    return Measurement(
        started_at,
        ended_at=pieces[-1],
        piece_times=list(pieces),
        prompt_tokens=100,
        completion_tokens=len(pieces),
        cached_tokens=cached_tokens,
        reuse_path="private_endpoint" if cached_tokens else "root",
    )


COLD = _answered(0.0, [2.0, 2.5, 3.5])
WARM = _answered(1.0, [1.5, 2.0, 2.5], cached_tokens=90)
FAILED = Measurement(0.5, ended_at=5.0, error="server_overloaded")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ttft_ms", (2, 1250, 2000)),
        ("ttft_hit_ms", (1, 500, 500)),
        ("ttft_miss_ms", (1, 2000, 2000)),
        ("inter_token_ms", (2, 625, 750)),
        ("gap_ms", (4, 500, 1000)),
        ("stream_tokens_per_second", (2, (2 + 1 / 0.75) / 2, 2)),
    ],
)
def test_quantiles_are_of_the_requests_they_name(name, expected):
    quantiles = getattr(summarise([COLD, WARM, FAILED]), name)
    assert (quantiles.count, quantiles.p50, quantiles.max) == pytest.approx(expected)


def test_quantiles_of_a_hundred_values():
    summary = summarise([_answered(0.0, [n / 1000]) for n in range(101)])
    assert asdict(summary.ttft_ms) == pytest.approx(asdict(Quantiles(101, 50, 90, 99, 100)))


def test_totals_count_what_succeeded_over_the_whole_time():
    summary = summarise([COLD, WARM, FAILED])
    assert (summary.requests, summary.errors) == (3, {"server_overloaded": 1})
    assert (summary.prompt_tokens, summary.cached_tokens, summary.completion_tokens) == (200, 90, 6)
    assert (summary.seconds, summary.total_tokens_per_second) == pytest.approx((5.0, 1.2))
    assert summary.reuse_paths == {"root": 1, "private_endpoint": 1}


@pytest.mark.parametrize("measurements", [[], [FAILED], [_answered(0.0, [1.0])], [COLD, WARM, FAILED]])
def test_any_outcome_can_be_printed_and_written(measurements):
    summary = summarise(measurements)
    assert json.loads(json.dumps(asdict(summary)))["requests"] == len(measurements)
    console = Console(width=120, file=io.StringIO())
    with console.capture() as printed:
        console.print(render("title", summary))
    assert ("server_overloaded 1" in printed.get()) == (FAILED in measurements)
