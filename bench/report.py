"""From measurements to figures: quantiles, rates, reuse and errors; as a table and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from rich.console import Group
from rich.table import Table

from bench.client import Measurement


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Of one figure over all requests, or over all gaps."""

    count: int
    p50: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class Summary:
    """Everything a load showed. Figures are of the requests that succeeded; None where there were none."""

    requests: int
    errors: dict[str, int]
    """Requests that failed, by kind."""
    seconds: float
    """From the first request's start to the last one's end."""
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    total_tokens_per_second: float
    """Completion tokens of all streams by `seconds`."""
    ttft_ms: Quantiles | None
    ttft_hit_ms: Quantiles | None
    """Of the requests that reused anything."""
    ttft_miss_ms: Quantiles | None
    inter_token_ms: Quantiles | None
    """Mean distance of a stream's tokens, by stream."""
    gap_ms: Quantiles | None
    """Each distance between two pieces of a stream; how long a reader sees nothing."""
    stream_tokens_per_second: Quantiles | None
    """After the first token, by stream."""
    reuse_paths: dict[str, int]


def summarise(measurements: Sequence[Measurement]) -> Summary:
    """The figures of these requests."""
    good = [each for each in measurements if not each.error]
    seconds = (
        max(each.ended_at for each in measurements) - min(each.started_at for each in measurements)
        if measurements
        else 0.0
    )
    answered = [each for each in good if each.piece_times]
    intervals = [
        (each.piece_times[-1] - each.piece_times[0]) / (each.completion_tokens - 1)
        for each in answered
        if each.completion_tokens > 1 and len(each.piece_times) > 1
    ]
    completion_tokens = sum(each.completion_tokens for each in good)
    return Summary(
        requests=len(measurements),
        errors=dict(Counter(each.error for each in measurements if each.error)),
        seconds=seconds,
        prompt_tokens=sum(each.prompt_tokens for each in good),
        cached_tokens=sum(each.cached_tokens for each in good),
        completion_tokens=completion_tokens,
        total_tokens_per_second=completion_tokens / seconds if seconds else 0.0,
        ttft_ms=quantiles(1e3 * _ttft(each) for each in answered),
        ttft_hit_ms=quantiles(1e3 * _ttft(each) for each in answered if each.cached_tokens),
        ttft_miss_ms=quantiles(1e3 * _ttft(each) for each in answered if not each.cached_tokens),
        inter_token_ms=quantiles(1e3 * interval for interval in intervals),
        gap_ms=quantiles(1e3 * (b - a) for each in answered for a, b in pairwise(each.piece_times)),
        stream_tokens_per_second=quantiles(1 / interval for interval in intervals if interval > 0),
        reuse_paths=dict(Counter(each.reuse_path for each in good if each.reuse_path)),
    )


def render(title: str, summary: Summary) -> Group:
    """The summary for a terminal."""
    table = Table(title=title)
    table.add_column("")
    for column in ("p50", "p90", "p99", "max", "of"):
        table.add_column(column, justify="right")
    for name, quantiles in (
        ("time to first token, ms", summary.ttft_ms),
        ("  with reuse", summary.ttft_hit_ms),
        ("  without", summary.ttft_miss_ms),
        ("between tokens, ms (mean of a stream)", summary.inter_token_ms),
        ("between pieces, ms", summary.gap_ms),
        ("tokens/s of a stream", summary.stream_tokens_per_second),
    ):
        if quantiles is not None:
            figures = (quantiles.p50, quantiles.p90, quantiles.p99, quantiles.max)
            table.add_row(name, *(f"{figure:,.1f}" for figure in figures), f"{quantiles.count:,}")
    return Group(table, *_lines(summary))


def _lines(summary: Summary) -> Iterable[str]:
    failed = sum(summary.errors.values())
    yield (
        f"{summary.requests - failed:,} requests in {summary.seconds:.1f} s, {summary.completion_tokens:,} tokens: "
        f"{summary.total_tokens_per_second:,.1f} tokens/s"
    )
    share = 100 * summary.cached_tokens / summary.prompt_tokens if summary.prompt_tokens else 0.0
    paths = ", ".join(f"{path} {count:,}" for path, count in sorted(summary.reuse_paths.items()))
    yield f"{summary.cached_tokens:,} of {summary.prompt_tokens:,} prompt tokens reused ({share:.1f} %); {paths or '-'}"
    if failed:
        yield f"{failed:,} failed: {', '.join(f'{kind} {count:,}' for kind, count in sorted(summary.errors.items()))}"


def _ttft(measurement: Measurement) -> float:
    return measurement.piece_times[0] - measurement.started_at


def quantiles(values: Iterable[float]) -> Quantiles | None:
    """None where there are no values."""
    sample = np.fromiter(values, np.float64)
    if not len(sample):
        return None
    p50, p90, p99 = np.percentile(sample, (50, 90, 99)).tolist()
    return Quantiles(len(sample), p50, p90, p99, float(sample.max()))
