"""Speed of a model's prefill and decode beside transformers, on this machine, in alternating rounds."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from bench.contenders import Contender, Dalsegno, Transformers
from engine.catalog import resolve_model
from engine.errors import EngineError
from engine.progress import track

PREFILL_TOKENS = (512, 2048)
DECODE_BATCHES = (1, 8)
DECODE_CONTEXT_TOKENS = 512
STEPS_IN_A_ROUND = 16


@dataclass(frozen=True, slots=True)
class Result:
    """One workload: tokens per second of each contender (medians), and the ratio of each round."""

    workload: str
    dalsegno_tokens_per_second: float
    transformers_tokens_per_second: float
    ratio: float
    """Median over the rounds of transformers' seconds by dalsegno's: above 1, dalsegno is faster."""
    ratio_min: float
    ratio_max: float
    rounds: int


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench models", description=__doc__)
    parser.add_argument("model", help="a folder, a hub id, or a short name")
    parser.add_argument("--rounds", type=int, default=7, help="alternating rounds for each workload (default 7)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads of both (default all)")
    parser.add_argument("--json", metavar="FILE", help="write the results there too; - is standard output")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    try:
        folder = resolve_model(options.model)
        results = measure(folder, options.rounds)
    except EngineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 3
    _print_table(f"{options.model}, float32, {options.threads} threads", results)
    if options.json:
        text = json.dumps(
            {"model": options.model, "threads": options.threads, "results": [asdict(result) for result in results]},
            indent=2,
        )
        if options.json == "-":
            print(text)
        else:
            Path(options.json).write_text(text + "\n")
    return 0


def measure(folder: Path, rounds: int) -> list[Result]:
    """Every workload, `rounds` times each after one warm-up; who goes first changes with each round."""
    contenders: tuple[Contender, Contender] = (Dalsegno(folder), Transformers(folder))
    total = (len(PREFILL_TOKENS) + len(DECODE_BATCHES)) * rounds
    results = []
    with track(f"measuring {folder.name}", total, unit="rounds") as advance:
        for tokens in PREFILL_TOKENS:
            for contender in contenders:
                contender.prefill(tokens)
            seconds = []
            for i in range(rounds):
                seconds.append(_alternate(contenders, i, lambda one, n=tokens: one.prefill(n)))
                advance(1)
            results.append(_result(f"prefill {tokens}", tokens, seconds))
        for batch in DECODE_BATCHES:
            for contender in contenders:
                contender.start_decode(batch, DECODE_CONTEXT_TOKENS, (rounds + 1) * STEPS_IN_A_ROUND)
                contender.decode(STEPS_IN_A_ROUND)
            seconds = []
            for i in range(rounds):
                seconds.append(_alternate(contenders, i, lambda one: one.decode(STEPS_IN_A_ROUND)))
                advance(1)
            results.append(_result(f"decode, batch {batch}", batch * STEPS_IN_A_ROUND, seconds))
    return results


def _alternate(
    contenders: tuple[Contender, Contender], i: int, run: Callable[[Contender], float]
) -> tuple[float, float]:
    """Seconds of each contender in one round."""
    order = (0, 1) if i % 2 == 0 else (1, 0)
    seconds = {which: run(contenders[which]) for which in order}
    return seconds[0], seconds[1]


def _result(workload: str, tokens: int, seconds: list[tuple[float, float]]) -> Result:
    ratios = [theirs / ours for ours, theirs in seconds]
    return Result(
        workload=workload,
        dalsegno_tokens_per_second=tokens / statistics.median(ours for ours, _ in seconds),
        transformers_tokens_per_second=tokens / statistics.median(theirs for _, theirs in seconds),
        ratio=statistics.median(ratios),
        ratio_min=min(ratios),
        ratio_max=max(ratios),
        rounds=len(ratios),
    )


def _print_table(title: str, results: list[Result]) -> None:
    table = Table(title=title)
    for column in ("workload", "dalsegno tok/s", "transformers tok/s", "ratio", "min to max"):
        table.add_column(column, justify="left" if column == "workload" else "right")
    for result in results:
        table.add_row(
            result.workload,
            f"{result.dalsegno_tokens_per_second:,.0f}",
            f"{result.transformers_tokens_per_second:,.0f}",
            f"{result.ratio:.2f}",
            f"{result.ratio_min:.2f} to {result.ratio_max:.2f}",
        )
    Console(stderr=True).print(table)
