"""What the check found: comparisons, figures and what was left out; as tables, as JSON, and as an exit code."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table


class Verdict(StrEnum):
    RIGHT = "right"
    WRONG = "WRONG"


@dataclass(frozen=True, slots=True)
class Comparison:
    """One thing that has a right answer, and how far off it was."""

    section: str
    what: str
    case: str
    error: float | None
    """The worst row's relative error; None where it is a matter of yes or no."""
    tolerance: float | None
    verdict: Verdict
    detail: str = ""

    @property
    def is_right(self) -> bool:
        return self.verdict is Verdict.RIGHT


@dataclass(frozen=True, slots=True)
class Figure:
    """A measured number: median and quartiles over `samples`; `bound` is what the roofline allows, in the same unit."""

    section: str
    what: str
    unit: str
    median: float
    low: float
    high: float
    samples: int
    bound: float | None = None
    note: str = ""

    def line(self) -> str:
        spread = f"{_short(self.low)} to {_short(self.high)}"
        return f"{self.what}: {_short(self.median)} {self.unit} ({spread}, {self.samples} samples)"


@dataclass(frozen=True, slots=True)
class Skip:
    """What was not run here, and why."""

    section: str
    what: str
    why: str


@dataclass(slots=True)
class Report:
    """Mutable: the sections append to it, in order; `tell` prints a line as it goes."""

    seed: int
    console: Console
    machine: dict[str, str] = field(default_factory=dict)
    choices: list[dict[str, str]] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    skips: list[Skip] = field(default_factory=list)
    _started: float = field(default_factory=time.monotonic)

    def compared(self, comparison: Comparison) -> None:
        self.comparisons.append(comparison)
        if not comparison.is_right:
            self.tell(f"  WRONG: {comparison.what}, {comparison.case}: {comparison.detail or _error(comparison)}")

    def measured(self, figure: Figure) -> None:
        self.figures.append(figure)
        self.tell(f"  {figure.line()}")

    def skipped(self, section: str, what: str, why: str) -> None:
        self.skips.append(Skip(section, what, why))
        self.tell(f"  SKIPPED: {section}, {what}: {why}")

    def tell(self, line: str) -> None:
        self.console.print(escape(line), highlight=False, soft_wrap=True)

    @property
    def is_right(self) -> bool:
        return all(comparison.is_right for comparison in self.comparisons)

    @property
    def exit_code(self) -> int:
        """0 when everything that ran was right."""
        return 0 if self.is_right else 1

    def write_json(self, path: Path) -> None:
        path.write_text(json.dumps(self.as_dict(), indent=2) + "\n", encoding="utf-8")

    def as_dict(self) -> dict[str, Any]:
        return {
            "date": time.strftime("%Y-%m-%d"),
            "seed": self.seed,
            "seconds": round(time.monotonic() - self._started, 1),
            "right": self.is_right if self.comparisons else None,
            "machine": self.machine,
            "kernels": self.choices,
            "comparisons": [_plain(asdict(each)) for each in self.comparisons],
            "figures": [_plain(asdict(each)) for each in self.figures],
            "skipped": [asdict(each) for each in self.skips],
        }

    def print_tables(self) -> None:
        for table in (self._comparisons_table(), self._figures_table()):
            if table.row_count:
                self.console.print(table)
        for skip in self.skips:
            self.tell(f"not run here: {skip.section}, {skip.what}: {skip.why}")
        wrong = sum(not each.is_right for each in self.comparisons)
        seconds = time.monotonic() - self._started
        self.tell(
            f"{len(self.comparisons)} comparisons, {wrong} wrong; {len(self.figures)} figures; "
            f"{len(self.skips)} left out; {seconds:.0f} s; seed {self.seed}"
        )

    def _comparisons_table(self) -> Table:
        table = Table(title="right or wrong")
        for column in ("section", "what", "case", "error", "allowed", "verdict"):
            table.add_column(column, justify="right" if column in ("error", "allowed") else "left")
        for each in self.comparisons:
            error = "" if each.error is None else f"{each.error:.1e}"
            allowed = "" if each.tolerance is None else f"{each.tolerance:.0e}"
            cells = (each.section, each.what, each.case, error, allowed, each.verdict.value)
            table.add_row(*map(escape, cells), style=None if each.is_right else "bold red")
        return table

    def _figures_table(self) -> Table:
        table = Table(title="figures")
        for column in ("what", "median", "quartiles", "unit", "roofline", "of it", "note"):
            table.add_column(column, justify="left" if column in ("what", "unit", "note") else "right")
        for each in self.figures:
            bound = "" if each.bound is None else _short(each.bound)
            table.add_row(
                escape(each.what),
                _short(each.median),
                f"{_short(each.low)} to {_short(each.high)}",
                escape(each.unit),
                bound,
                _share(each),
                escape(each.note),
            )
        return table


def figure_of(
    section: str, what: str, unit: str, values: Sequence[float], *, bound: float | None = None, note: str = ""
) -> Figure:
    """Median and quartiles of `values`."""
    low, median, high = np.percentile(np.array(values, np.float64), (25, 50, 75)).tolist()
    return Figure(section, what, unit, median, low, high, len(values), bound, note)


def table_of_choices(choices: Iterable[dict[str, str]]) -> Table:
    """What serves each kernel."""
    table = Table(title="what serves each kernel")
    for column in ("kernel", "implementation", "why not the first choice"):
        table.add_column(column)
    for choice in choices:
        table.add_row(*(escape(choice[key]) for key in ("kernel", "implementation", "reason")))
    return table


def _share(figure: Figure) -> str:
    """How much of the roofline was reached: bound / time, or rate / bound."""
    if not figure.bound or not figure.median:
        return ""
    is_time = figure.unit in ("ms", "us", "s")
    share = figure.bound / figure.median if is_time else figure.median / figure.bound
    return f"{100 * share:.0f} %"


def _error(comparison: Comparison) -> str:
    return f"error {comparison.error}, allowed {comparison.tolerance}"


def _short(value: float) -> str:
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{digits}f}"


def _plain(record: dict[str, Any]) -> dict[str, Any]:
    """JSON has neither infinities nor NaN."""
    return {
        key: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in record.items()
    }
