"""What came of compiling something for a GPU that is not here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Built:
    """One module or kernel for one architecture."""

    architecture: str
    module: str
    kind: str
    seconds: float
    size_bytes: int
    error: str = ""


def print_table(title: str, results: Sequence[Built]) -> None:
    """One row each, and how many minutes it took; what failed comes after, in the compiler's words."""
    table = Table(title=title)
    for column in ("architecture", "module", "seconds", "KiB", ""):
        table.add_column(column, justify="right" if column in ("seconds", "KiB") else "left")
    for result in results:
        size = f"{result.size_bytes / 1024:,.0f}" if result.size_bytes else ""
        verdict = "failed" if result.error else "built"
        table.add_row(result.architecture, result.module, f"{result.seconds:.1f}", size, verdict)
    minutes = sum(result.seconds for result in results) / 60
    console = Console()
    console.print(table)
    console.print(f"{sum(not result.error for result in results)} of {len(results)} built in {minutes:.1f} minutes")
    for result in results:
        if result.error:
            print(f"\n{result.module} for {result.architecture}:\n{result.error}")
