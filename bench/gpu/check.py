"""`python -m bench.gpu.check`: is everything right on this CUDA machine, and how fast is it? In ten minutes."""

from __future__ import annotations

import argparse
import logging
import random
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from rich.console import Console

from bench.gpu.batches import Batch, random_batches
from bench.gpu.budget import Budget
from bench.gpu.build import compile_modules
from bench.gpu.copies import run_copies
from bench.gpu.demo import run_demo
from bench.gpu.linear_trials import room_classes, run_backend_linears, run_class_linears
from bench.gpu.machine import Machine, find_machine
from bench.gpu.plain_trials import plain_trials, rope_trials
from bench.gpu.report import Comparison, Report, Verdict, figure_of, table_of_choices
from bench.gpu.roofline import Peaks, measure_peaks
from bench.gpu.sampling_trials import run_sampling
from bench.gpu.shapes import DENSE_HEADS, HYBRID_27B, TINY, with_heads
from bench.gpu.speed import REHEARSAL, Load, run_speed
from bench.gpu.state_trials import page_trials, slot_trials
from bench.gpu.trials import DeviceLostError, generator_for, run_trials
from engine.errors import BackendUnavailableError
from engine.graphs import CapturableKernels, Recorder
from engine.kernels import Kernels
from engine.kernels.flashinfer.library import load_library
from engine.kernels.select import select_kernels
from engine.kernels.torch import TorchKernels
from engine.models.config import ModelConfig

SECTIONS = ("compile", "kernels", "linear", "demo", "speed", "copies")
_BUDGET_SECONDS = 540.0
_LEAST_DEVICE_BYTES = 12 * 2**30


@dataclass(frozen=True, slots=True)
class Scale:
    """How large everything is: as the real model is, or tiny for a CPU."""

    config: ModelConfig
    page_size: int
    longest: int
    vocab: int
    load: Load
    copy_tokens: int
    peak: dict[str, int] = field(default_factory=dict)


FULL = Scale(HYBRID_27B, page_size=64, longest=2500, vocab=HYBRID_27B.vocab_size, load=Load(), copy_tokens=2048)
SMALL = Scale(
    TINY,
    page_size=16,
    longest=300,
    vocab=TINY.vocab_size,
    load=REHEARSAL,
    copy_tokens=64,
    peak={"copy_bytes": 2**20, "side": 128},
)


@dataclass(slots=True)
class Check:
    """One run. `make_candidate` gives the kernels that are checked, for a model; `library` is flashinfer, or None;
    `recorder` captures decode steps, by CUDA graphs if it is not given."""

    machine: Machine
    scale: Scale
    report: Report
    budget: Budget
    make_candidate: Callable[[ModelConfig], Kernels]
    demo_backend: str
    library: Any = None
    recorder: Recorder | None = None

    def run(self, names: Sequence[str]) -> None:
        """The sections, in their order. One that breaks is wrong, and the next is run, unless the device is lost."""
        for name in SECTIONS:
            if name not in names:
                continue
            self.report.tell(f"{name} ({self.budget.left_seconds:.0f} s left)")
            if self.budget.is_used:
                self.report.skipped(name, "all of it", self.budget.why)
                continue
            section: Callable[[], None] = getattr(self, f"_{name}")
            try:
                section()
            except DeviceLostError as error:
                self._broken(name, f"the device is lost: {error}")
                for later in SECTIONS[SECTIONS.index(name) + 1 :]:
                    self.report.skipped(later, "all of it", "the device is lost; run that section by itself")
                return
            except Exception as error:
                # A section that breaks must not hide the others.
                logging.getLogger(__name__).debug("section %s", name, exc_info=error)
                self._broken(name, f"{type(error).__name__}: {str(error)[:500]}")

    def _broken(self, name: str, detail: str) -> None:
        self.report.compared(Comparison(name, "the section itself", "", None, None, Verdict.WRONG, detail))

    def _compile(self) -> None:
        """All of flashinfer's modules at once, on all cores; one after the other, when they are first called, they take
        longer than all else. What was compiled before, or came in a package, is not compiled again."""
        capability = self.machine.traits.capability
        if self.library is None or self.machine.no_gpu or capability is None:
            self.report.skipped("compile", "flashinfer's modules", self.machine.no_gpu or self.machine.no_flashinfer)
            return
        if shutil.which("nvcc") is None:
            self.report.skipped("compile", "flashinfer's modules", "there is no nvcc; what is not there yet will fail")
            return
        self.report.tell("  the first time this takes minutes, which are not counted")
        count, seconds = compile_modules(f"{capability[0]}.{capability[1]}")
        self.budget.extend(seconds)
        self.report.measured(figure_of("compile", f"compiling {count} modules of flashinfer", "s", [seconds]))

    def _kernels(self) -> None:
        config, seed = self.scale.config, self.report.seed
        candidate = self.make_candidate(config)
        self._tell_choices(candidate)
        batches = random_batches(self.scale.page_size, self.scale.longest, generator_for(seed, "batches"))
        for case, trials in (
            ("norms and activations", plain_trials(config, seed)),
            ("rope", rope_trials(config, batches, seed)),
            ("pages", page_trials(config, batches, seed)),
            ("slots", slot_trials(config, batches, seed)),
        ):
            self.report.tell(f"  {case}")
            run_trials("kernels", trials, TorchKernels(), candidate, self.report, self.budget)
        run_sampling("kernels", self.scale.vocab, seed, TorchKernels(), candidate, self.report, self.budget)
        self._prepared_decodes(candidate, config, batches)
        dense = with_heads(config, DENSE_HEADS) if self.scale is FULL else config
        if dense is not config:
            self.report.tell(f"  pages, heads of {dense.attention.head_dim}")
            both = chain(rope_trials(dense, batches, seed), page_trials(dense, batches, seed))
            run_trials("kernels", both, TorchKernels(), self.make_candidate(dense), self.report, self.budget)

    def _prepared_decodes(self, candidate: Kernels, config: ModelConfig, batches: list[Batch]) -> None:
        """Decodes again, planned into memory that stays where it is, as captured steps need it."""
        what = "decodes in memory that stays (for graphs)"
        if not isinstance(candidate, CapturableKernels):
            self.report.skipped("kernels", what, f"the {candidate.name} kernels have no such thing")
            return
        decodes = [batch for batch in batches if batch.is_decodes]
        pages = max(len(batch.layout.kv_indices) for batch in decodes)
        candidate.prepare_decodes(max(len(batch.new_tokens) for batch in decodes), pages)
        self.report.tell(f"  {what}")
        seed = self.report.seed + 1
        trials = (
            *rope_trials(config, decodes, seed),
            *page_trials(config, decodes, seed),
            *slot_trials(config, decodes, seed),
        )
        run_trials("prepared", trials, TorchKernels(), candidate, self.report, self.budget)

    def _linear(self) -> None:
        config, seed = self.scale.config, self.report.seed
        candidate = self.make_candidate(config)
        run_backend_linears("linear", config, seed, candidate, self.report, self.budget)
        traits = self.machine.traits
        classes = list(room_classes(candidate, traits, self.library or object()))
        run_class_linears("linear", classes, config, seed, candidate, traits, self.report, self.budget)

    def _demo(self) -> None:
        if not self.demo_backend:
            self.report.skipped("demo", "the bundled model", self.machine.no_flashinfer or self.machine.no_gpu)
            return
        run_demo(self.demo_backend, self.report)  # type: ignore[arg-type]

    def _speed(self) -> None:
        config, load = self.scale.config, self.scale.load
        run_speed(
            config, lambda: self.make_candidate(config), self._peaks(), load, self.report, self.budget, self.recorder
        )

    def _copies(self) -> None:
        run_copies(
            self.scale.config,
            self.machine.device,
            self._peaks(),
            self.report,
            page_size=self.scale.page_size,
            tokens=self.scale.copy_tokens,
            rounds=self.scale.load.rounds,
        )

    def _peaks(self) -> Peaks:
        """Measured again for each section that asks: clocks change with the load."""
        peaks, figures = measure_peaks(self.machine.device, **self.scale.peak)
        for figure in figures:
            self.report.measured(figure)
        return peaks

    def _tell_choices(self, candidate: Kernels) -> None:
        self.report.choices = [
            {"kernel": choice.kernel, "implementation": choice.implementation, "reason": choice.reason}
            for choice in candidate.choices
        ]
        self.report.console.print(table_of_choices(self.report.choices))


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.check", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there too")
    parser.add_argument("--seed", type=int, help="of all random inputs (default: another each time; it is printed)")
    parser.add_argument("--budget-s", type=float, default=_BUDGET_SECONDS, help="seconds, then the rest is left out")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="sections to run")
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="run every section on the CPU with a tiny model: no figure means anything",
    )
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    seed = random.SystemRandom().randrange(2**31) if options.seed is None else options.seed
    report = Report(seed, _console())
    machine = find_machine(is_rehearsal=options.rehearse)
    report.machine = machine.facts
    for name, value in machine.facts.items():
        report.tell(f"{name}: {value}")
    report.tell(f"seed: {seed}")
    check = _check(machine, report, Budget(options.budget_s), is_rehearsal=options.rehearse)
    is_whole = True
    try:
        if check is not None:
            check.run(options.only)
    except KeyboardInterrupt:
        is_whole = False
        report.skipped("check", "the rest", "it was interrupted")
    report.print_tables()
    if options.json is not None:
        report.write_json(options.json)
    return report.exit_code if is_whole else 130


def _check(machine: Machine, report: Report, budget: Budget, *, is_rehearsal: bool) -> Check | None:
    """None where there is nothing to check: then the report says so of every section."""
    if is_rehearsal:
        return Check(machine, SMALL, report, budget, lambda _: TorchKernels(torch.bfloat16), "torch")
    if machine.no_gpu:
        for name in SECTIONS:
            report.skipped(name, "all of it", machine.no_gpu)
        report.tell("without a GPU there is nothing to check here; --rehearse runs every section on the CPU, tiny")
        return None
    try:
        library = None if machine.no_flashinfer else load_library()
    except BackendUnavailableError as error:
        library, machine = None, replace(machine, no_flashinfer=str(error))
    _tell_what_is_missing(machine, report)
    if library is None:
        return Check(machine, FULL, report, budget, lambda _: TorchKernels(torch.bfloat16, machine.device), "")
    return Check(
        machine, FULL, report, budget, lambda config: select_kernels("flashinfer", config), "flashinfer", library
    )


def _tell_what_is_missing(machine: Machine, report: Report) -> None:
    for what, why in (
        ("flashinfer's kernels and the bundled model on them", machine.no_flashinfer),
        ("the Triton linear layer", machine.no_triton),
        ("activations in fp4", machine.no_fp4),
        ("activations in fp8", machine.no_fp8),
    ):
        if why:
            report.skipped("machine", what, why)
    if machine.traits.total_bytes < _LEAST_DEVICE_BYTES:
        gib = machine.traits.total_bytes / 2**30
        report.skipped("machine", "everything at its full size", f"{gib:.0f} GiB of memory: some parts will not fit")


def _console() -> Console:
    """Wide enough for the tables where the output is a file."""
    console = Console()
    return console if console.is_terminal else Console(width=170)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
