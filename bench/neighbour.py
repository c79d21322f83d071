"""Prefill and decode alone and beside one process that spins, by how torch's threads wait for one another, in turns."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from engine.catalog import resolve_model
from engine.errors import EngineError
from engine.progress import track

WAITING: dict[str, dict[str, str]] = {
    "chosen here": {},
    "library's own": {"GOMP_SPINCOUNT": "300000"},
    "asleep at once": {"OMP_WAIT_POLICY": "passive"},
    "one thread": {"OMP_NUM_THREADS": "1"},
}
OWN = "library's own"
_SPIN = "while True: pass"
_CONTEXT_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Result:
    """One workload with one way to wait: seconds alone (median), and ratios with their spread over the rounds."""

    waiting: str
    workload: str
    alone_seconds: float
    alone_to_own: float
    """By the library's own waiting, alone."""
    beside_to_alone: float
    beside_to_alone_min: float
    beside_to_alone_max: float


class Worker:
    """A process of its own, for what its environment chose holds until it ends. It works when it is asked, and sleeps
    between. Mutable: `with` ends it."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
        command = [sys.executable, "-m", "bench", "neighbour", str(folder), "--worker"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**inherited, **environment}
        )

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def seconds(self, workload: str, amount: int) -> float:
        """Of so many prompt tokens (prefill), or so many steps (decode)."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(workload, amount, file=self._process.stdin, flush=True)
        return float(self._process.stdout.readline())


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench neighbour", description=__doc__)
    parser.add_argument("model", help="a folder, a hub id, or a short name")
    parser.add_argument("--rounds", type=int, default=5, help="rounds, alone and beside (default 5)")
    parser.add_argument("--prefill", type=int, default=256, help="tokens of the prompt (default 256)")
    parser.add_argument("--decode", type=int, default=16, help="steps (default 16)")
    parser.add_argument("--json", metavar="FILE", help="write the results there too")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    try:
        folder = resolve_model(options.model)
    except EngineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 3
    if options.worker:
        _work(folder)
        return 0
    results = measure(folder, options.rounds, {"prefill": options.prefill, "decode": options.decode})
    _print_table(f"{options.model}, alone and beside one busy process", results)
    if options.json:
        Path(options.json).write_text(json.dumps([asdict(result) for result in results], indent=2) + "\n")
    return 0


def measure(folder: Path, rounds: int, workloads: dict[str, int]) -> list[Result]:
    """Each way to wait and each workload, alone and beside, `rounds` times; who goes first changes with each round."""
    with ExitStack() as stack:
        workers = {name: stack.enter_context(Worker(folder, added)) for name, added in WAITING.items()}
        _settle(workers, workloads)  # they load the model, and warm up
        alone: dict[tuple[str, str], list[float]] = {}
        beside: dict[tuple[str, str], list[float]] = {}
        with track(f"measuring {folder.name}", 2 * rounds, unit="rounds") as advance:
            for i in range(rounds):
                names = [*workers][i % len(workers) :] + [*workers][: i % len(workers)]
                _settle(workers, workloads)
                _note(workers, names, workloads, alone)
                advance(1)
                with _busy_process():
                    _settle(workers, workloads)
                    _note(workers, names, workloads, beside)
                advance(1)
    return [_result(name, workload, alone, beside) for name in WAITING for workload in workloads]


def _round(worker: Worker, workloads: dict[str, int]) -> dict[str, float]:
    return {workload: worker.seconds(workload, amount) for workload, amount in workloads.items()}


def _settle(workers: dict[str, Worker], workloads: dict[str, int]) -> None:
    """Work that is not measured, for what suits itself to the cores does so while it works."""
    for worker in workers.values():
        _round(worker, workloads)


def _note(
    workers: dict[str, Worker],
    names: list[str],
    workloads: dict[str, int],
    seconds: dict[tuple[str, str], list[float]],
) -> None:
    for name in names:
        for workload, found in _round(workers[name], workloads).items():
            seconds.setdefault((name, workload), []).append(found)


@contextmanager
def _busy_process() -> Iterator[None]:
    # In a session of its own, as another program would be: the kernel may share processors out by session.
    with subprocess.Popen([sys.executable, "-S", "-c", _SPIN], start_new_session=True) as process:
        try:
            yield
        finally:
            process.kill()


def _result(
    name: str,
    workload: str,
    alone: dict[tuple[str, str], list[float]],
    beside: dict[tuple[str, str], list[float]],
) -> Result:
    usual = statistics.median(alone[name, workload])
    ratios = [seconds / usual for seconds in beside[name, workload]]
    own = statistics.median(alone[OWN, workload])
    return Result(name, workload, usual, usual / own, statistics.median(ratios), min(ratios), max(ratios))


def _work(folder: Path) -> None:
    """Until standard input ends."""
    from bench.contenders import Dalsegno

    contender = Dalsegno(folder)
    for line in sys.stdin:
        workload, amount = line.split()
        if workload == "prefill":
            seconds = contender.prefill(int(amount))
        else:
            contender.start_decode(1, _CONTEXT_TOKENS, int(amount) + 1)
            contender.decode(1)
            seconds = contender.decode(int(amount))
        print(seconds, flush=True)


def _print_table(title: str, results: list[Result]) -> None:
    table = Table(title=title)
    for column in ("waiting", "workload", "alone ms", "by the library's own", "beside, by alone", "min to max"):
        table.add_column(column, justify="left" if column in ("waiting", "workload") else "right")
    for result in results:
        table.add_row(
            result.waiting,
            result.workload,
            f"{1000 * result.alone_seconds:,.0f}",
            f"{result.alone_to_own:.2f}",
            f"{result.beside_to_alone:.2f}",
            f"{result.beside_to_alone_min:.2f} to {result.beside_to_alone_max:.2f}",
        )
    Console(stderr=True).print(table)
