"""A simulation's figures for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rich.console import Group
from rich.table import Table

from bench.replay.summary import Summary

_GB = 1e9


def render(title: str, summary: Summary) -> Group:
    """The summary as a table of figures, one of hours, and lines."""
    return Group(_figures(title, summary), _hours(summary), *_lines(summary))


def _figures(title: str, summary: Summary) -> Table:
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    reuse = summary.reuse
    table.add_row("requests", f"{reuse.requests:,} in {summary.seconds / 3600:.2f} virtual hours")
    table.add_row("token hit rate", f"{reuse.hit_rate:.1%} of {reuse.prompt_tokens:,}")
    table.add_row("achieved of achievable", f"{reuse.achieved:.1%} of {reuse.achievable_tokens:,}")
    table.add_row("from host memory", f"{reuse.host_tokens:,} tokens")
    if summary.ttft_seconds is not None:
        ttft = summary.ttft_seconds
        table.add_row("time to first token, p50 / p90 / p99", f"{ttft.p50:.2f} / {ttft.p90:.2f} / {ttft.p99:.2f} s")
    table.add_row("longest queue", f"{summary.longest_queue:,} requests")
    for reason, tokens in summary.lost_tokens.items():
        table.add_row(f"lost: {reason}", f"{tokens:,} tokens")
    for pool, kinds in summary.evictions.items():
        table.add_row(f"evicted from {pool}", f"{sum(kinds.values()):,} checkpoints")
    for direction, moved in sorted(summary.moved_bytes.items()):
        table.add_row(f"moved: {direction}", f"{moved / _GB:,.1f} GB")
    return table


def _hours(summary: Summary) -> Table:
    table = Table(title="by hour", title_justify="left")
    for column in ("hour", "requests", "token hit rate", "achieved of achievable"):
        table.add_column(column, justify="right")
    for number, hour in enumerate(summary.hours, 1):
        table.add_row(str(number), f"{hour.requests:,}", f"{hour.hit_rate:.1%}", f"{hour.achieved:.1%}")
    return table


def _lines(summary: Summary) -> Iterable[str]:
    yield f"reused by path: {_counts(summary.paths)}"
    for pool, kinds in summary.evictions.items():
        yield f"evicted from {pool}: {_counts(kinds)}"
    yield f"not captured, or not copied to host memory: {_counts(summary.publish_skipped)}"
    if summary.refused:
        yield f"{summary.refused:,} requests were refused, for they can never fit into the KV pages"
    if summary.suspensions:
        yield f"{summary.suspensions:,} times a request was suspended for want of KV pages"
    found = f"{len(summary.violations):,} violations, {summary.orphans:,} orphans"
    yield f"{summary.checks:,} audits of every pool and reference: {found}"
    yield from summary.violations[:10]


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in sorted(counts.items())) or "-"
