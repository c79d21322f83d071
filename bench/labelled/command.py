"""`python -m bench labelled`: every stream, what was said about it and how soon, as tables."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from pathlib import Path

from bench.labelled.judge import Verdict, judge
from bench.labelled.observers import ALARMS, ROOTS_IN_A_ROW
from bench.labelled.orders import calm_streams, order_streams
from bench.labelled.streams import Stream, faulty_streams, hard_streams, healthy_streams, recovering_streams
from ops.insights.types import ReuseState

_SEEDS = 3
SOON = 5
"""Requests that the daemon would have served from its cache: so soon a fault is to be told."""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench labelled", description=__doc__)
    parser.add_argument("--seeds", type=int, default=_SEEDS, help=f"streams of each kind (default {_SEEDS})")
    parser.add_argument("--first-seed", type=int, default=0, help="other streams of the same kinds (default 0)")
    parser.add_argument("--markdown", type=Path, help="also write the tables to this file")
    options = parser.parse_args(arguments)
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    ordered = _run(order_streams(seeds))
    calm = _run(calm_streams(seeds))
    faulty = _run(faulty_streams(seeds))
    recovering = _run(recovering_streams(seeds))
    healthy = _run(healthy_streams(seeds))
    hard = _run(hard_streams(seeds))
    tables = (
        _order_table("what is wrong", ordered, lambda each: str(each.stream.fault)),
        _order_table("who asks next", ordered, lambda each: str(each.stream.order)),
        _healthy_table(calm),
        _faulty_table(faulty),
        _recovery_lines(recovering),
        _healthy_table(healthy),
        _hard_lines(hard),
    )
    text = "\n\n".join("\n".join(table) for table in tables)
    text += "\n\n" + "\n".join(_summary([*ordered, *faulty], recovering, [*calm, *healthy])) + "\n"
    print(text)
    if options.markdown is not None:
        options.markdown.write_text(text, encoding="utf-8")
    return 0 if all(each.is_right for each in (*ordered, *calm, *faulty, *recovering, *healthy)) else 1


def _run(streams: Iterable[Stream]) -> list[Verdict]:
    verdicts = []
    for stream in streams:
        verdicts.append(judge(stream))
        print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return verdicts


def _groups(verdicts: Iterable[Verdict]) -> list[list[Verdict]]:
    return [list(each) for _, each in groupby(verdicts, key=lambda verdict: verdict.stream.name)]


def _order_table(title: str, verdicts: Sequence[Verdict], key: Callable[[Verdict], str]) -> list[str]:
    lines = [
        f"| {title} | streams | detected | requests until then: median | worst | within 5 | until `degraded`: median | "
        "worst |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(map(key, verdicts)):
        group = [each for each in verdicts if key(each) == name]
        delays = [each.delay for each in group if each.delay is not None]
        degraded = [each.degraded_delay for each in group if each.degraded_delay is not None]
        lines.append(
            f"| {name} | {len(group)} | {len(delays)} | {_median(delays)} | {max(delays, default='-')} | "
            f"{sum(delay <= SOON for delay in delays)} | {_median(degraded)} | {max(degraded, default='-')} |"
        )
    return lines


def _median(delays: Sequence[int]) -> str:
    return f"{statistics.median(delays):g}" if delays else "-"


def _faulty_table(verdicts: Sequence[Verdict]) -> list[str]:
    lines = [
        "| what is wrong | streams | detected | as | requests until then | until `collapsed` | supervisor's rule: "
        "alarmed | after | cleared by a hit |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for group in _groups(verdicts):
        found = [each for each in group if each.detected_at is not None]
        theirs = [each for each in group if each.supervisor_delay is not None]
        lines.append(
            f"| {group[0].stream.name} | {len(group)} | {len(found)} | {_names(each.detected_as for each in found)} | "
            f"{_list(each.delay for each in group)} | {_list(each.collapsed_delay for each in group)} | "
            f"{len(theirs)} | {_list(each.supervisor_delay for each in group)} | "
            f"{sum(each.supervisor_cleared for each in group)} |"
        )
    return lines


def _recovery_lines(verdicts: Sequence[Verdict]) -> list[str]:
    lines = ["| what was wrong, and is no longer | streams | at the end | false alarms |", "|---|---|---|---|"]
    for group in _groups(verdicts):
        ends = _names(each.ends_as.value for each in group)
        lines.append(f"| {group[0].stream.name} | {len(group)} | {ends} | {_false(group)} |")
    return lines


def _hard_lines(verdicts: Sequence[Verdict]) -> list[str]:
    lines = ["| worst cases | streams | what was said | requests until then |", "|---|---|---|---|"]
    for group in _groups(verdicts):
        said = [each.detected_as or "nothing" for each in group if each.stream.fault is not None]
        said += [alarm for each in group for alarm in each.false_alarms]
        lines.append(
            f"| {group[0].stream.name} | {len(group)} | {_names(said)} | {_list(each.delay for each in group)} |"
        )
    return lines


def _healthy_table(verdicts: Sequence[Verdict]) -> list[str]:
    lines = [
        "| harmless traffic | streams | requests | could have hit | false alarms | of the supervisor's rule | what was "
        "told |",
        "|---|---|---|---|---|---|---|",
    ]
    for group in _groups(verdicts):
        told = _names(each.value for verdict in group for each in verdict.told if each not in ALARMS)
        lines.append(
            f"| {group[0].stream.name} | {len(group)} | {sum(each.requests for each in group):,} | "
            f"{sum(each.chances for each in group):,} | {_false(group)} | "
            f"{sum(each.supervisor_false_alarms for each in group)} | {told} |"
        )
    return lines


def _summary(faulty: Sequence[Verdict], recovering: Sequence[Verdict], healthy: Sequence[Verdict]) -> list[str]:
    delays = [each.delay for each in faulty if each.delay is not None]
    supervised = [each for each in faulty if each.supervisor_delay is not None]
    in_time = sum(delay <= SOON for delay in delays)
    alarms = sum(bool(each.false_alarms) for each in healthy)
    before = sum(bool(each.false_alarms) for each in (*faulty, *recovering))
    well = sum(each.ends_as is ReuseState.HEALTHY for each in recovering)
    theirs = sum(bool(each.supervisor_false_alarms) for each in healthy)
    return [
        f"- Detected: {len(delays)} of {len(faulty)} faulty streams, after {_median(delays)} requests that their "
        f"twins without the fault served from their cache (median; {in_time} within {SOON}, at most {max(delays)}).",
        f"- False alarms: {alarms} of {len(healthy)} healthy streams; {before} of {len(faulty) + len(recovering)} "
        "others before their fault began, or without it.",
        f"- Healthy again after the cause was gone: {well} of {len(recovering)}.",
        f"- The supervisor's rule (host state slots at their maximum exactly, {ROOTS_IN_A_ROW} roots in a row, cleared "
        f"by any hit): alarmed in {len(supervised)} of {len(faulty)} faulty streams, in "
        f"{sum(each.supervisor_cleared for each in supervised)} of them a hit cleared it while the fault was there; "
        f"false alarms in {theirs} of {len(healthy)} healthy streams.",
    ]


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in dict.fromkeys(names)) or "-"


def _list(numbers: Iterable[int | None]) -> str:
    return ", ".join("-" if number is None else str(number) for number in numbers)


def _false(group: Iterable[Verdict]) -> str:
    return _names(alarm for verdict in group for alarm in verdict.false_alarms).replace("-", "none")
