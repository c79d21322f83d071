"""`python -m bench hostile`: a daemon of its own, and beside a stream and a probe each hostile or large request."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import reduce
from pathlib import Path
from urllib.parse import urlsplit

from rich.console import Console
from rich.table import Table

from bench.hostile.acts import Act, Address, Deed, acts
from bench.hostile.bodies import MAX_BODY_MIB
from bench.hostile.watch import Notice, Watch
from bench.private_daemon import PrivateDaemon, private_daemon
from engine.errors import EngineError
from engine.progress import track
from server.commands.interrupts import sigterm_as_ctrl_c
from server.configuration import resolve, to_toml

LIMIT_SECONDS = 0.05
"""What a stream or a probe may wait longer than without the request."""

_BASELINE_SECONDS = 2.0
_AFTER_SECONDS = 0.3
"""What a request sets off may go on behind its answer."""
_TRIES = 3
"""Of nothing, and of what is over the limit, for other programs on the machine keep it waiting too: the least counts,
on both sides, or a busy machine would excuse everything."""

_SETTINGS = {
    "server.max_body_mib": str(MAX_BODY_MIB),
    "server.header_timeout_s": "2",
    "server.body_timeout_s": "2",
    "ops.log_level": "warning",
}


@dataclass(frozen=True, slots=True)
class Result:
    """What came of one act."""

    name: str
    path: str
    answer: str
    is_right: bool
    seconds: float
    notice: Notice


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench hostile", description=__doc__)
    parser.add_argument("model", nargs="?", default="demo", help="a folder, a hub id, or a short name (default demo)")
    parser.add_argument("--only", default="", metavar="WORDS", help="requests whose name or path has these words")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    options = parser.parse_args(arguments)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    chosen = [act for act in acts() if options.only in f"{act.name} {act.path}"]
    try:
        with sigterm_as_ctrl_c(), private_daemon(_configuration(options.model)) as daemon:
            baseline, results, after = measure(daemon, chosen)
    except KeyboardInterrupt:
        print("stopped; the daemon has ended", file=sys.stderr)
        return 130
    except EngineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 3
    _tell(f"{options.model}, load {os.getloadavg()[0]:.1f} at the end", baseline, results, after)
    if options.json:
        found = {"baseline": asdict(baseline), "results": [asdict(result) for result in results]}
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0 if all(result.is_right for result in results) else 1


def measure(daemon: PrivateDaemon, chosen: Sequence[Act]) -> tuple[Notice, list[Result], Notice]:
    """First nothing for some seconds, several times, then each act alone, then nothing again."""
    url = urlsplit(daemon.url)
    assert url.hostname is not None
    assert url.port is not None
    address = url.hostname, url.port
    results = []
    with Watch(address, daemon.pid) as watch:
        baseline = reduce(Notice.least, [_do_nothing(watch) for _ in range(_TRIES)])
        with track("hostile requests", len(chosen), unit="requests") as advance:
            for act in chosen:
                results.append(_least(act, address, watch, baseline))
                advance(1)
        return baseline, results, _do_nothing(watch)


def _do_nothing(watch: Watch) -> Notice:
    then = watch.now()
    time.sleep(_BASELINE_SECONDS)
    return watch.since(then)


def _least(act: Act, address: Address, watch: Watch, baseline: Notice) -> Result:
    """Done again while it is over the limit, and of each figure the least."""
    deed = act.prepare()
    result = _do(act, deed, address, watch)
    for _ in range(_TRIES - 1):
        if not is_late(result.notice, baseline) or result.answer != str(act.expected):
            break
        again = _do(act, deed, address, watch)
        result = replace(again, seconds=min(result.seconds, again.seconds), notice=again.notice.least(result.notice))
    return result


def _do(act: Act, deed: Deed, address: Address, watch: Watch) -> Result:
    time.sleep(_AFTER_SECONDS)
    then = watch.now()
    answer = deed(address)
    seconds = time.perf_counter() - then[0]
    time.sleep(_AFTER_SECONDS)
    return Result(act.name, act.path, str(answer), answer == act.expected, seconds, watch.since(then))


def _configuration(model: str) -> str:
    resolved = resolve({"server.model": model, **_SETTINGS}, environ={})
    return to_toml(resolved.settings, resolved.origins)


def _tell(title: str, baseline: Notice, results: Sequence[Result], after: Notice) -> None:
    table = Table(title=title)
    for column in ("request", "path", "answer", "s", "gap ms", "probe ms", "processor s", "MiB after"):
        table.add_column(column, justify="left" if column in ("request", "path", "answer") else "right")
    table.add_row("none", "", "", "", *_figures(baseline, baseline))
    for result in results:
        answer = result.answer if result.is_right else f"WRONG: {result.answer}"
        figures = _figures(result.notice, baseline)
        table.add_row(result.name, result.path, answer, f"{result.seconds:.2f}", *figures)
    table.add_row("none", "", "", "", *_figures(after, baseline))
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    late = sum(is_late(result.notice, baseline) for result in results)
    wrong = sum(not result.is_right for result in results)
    print(f"{len(results)} requests, {wrong} with a wrong answer, {late} over {1e3 * LIMIT_SECONDS:.0f} ms (marked !)")


def is_late(notice: Notice, baseline: Notice) -> bool:
    """Whether the stream or the probe waited longer than it may."""
    return (
        notice.gap_seconds > baseline.gap_seconds + LIMIT_SECONDS
        or notice.wait_seconds > baseline.wait_seconds + LIMIT_SECONDS
    )


def _figures(notice: Notice, baseline: Notice) -> tuple[str, ...]:
    pairs = ((notice.gap_seconds, baseline.gap_seconds), (notice.wait_seconds, baseline.wait_seconds))
    waits = (f"{1e3 * now:,.0f}{' !' if now > before + LIMIT_SECONDS else ''}" for now, before in pairs)
    return (*waits, f"{notice.processor_seconds:.2f}", f"{notice.resident_bytes / 2**20:,.0f}")
