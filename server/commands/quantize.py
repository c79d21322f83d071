"""`dalsegno quantize`: an NVFP4 copy of a checkpoint."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from server.commands.options import with_settings
from server.configuration import Resolved


@with_settings()
def quantize(
    _resolved: Resolved,
    source: Annotated[str, typer.Argument(help="a model: folder, hub id or short name", metavar="SRC")],
    destination: Annotated[Path, typer.Argument(help="a folder that is empty or not there yet", metavar="DST")],
) -> None:
    """Write an NVFP4 copy of a checkpoint, whole or not at all, and show what rounding did to each layer."""
    from rich.console import Console
    from rich.table import Table

    from engine.catalog import resolve_model
    from engine.weights.quantize import quantize_checkpoint

    report = quantize_checkpoint(resolve_model(source), destination)
    table = Table("layer", "relative error", title=f"NVFP4 in {destination}")
    for layer in report.layers:
        table.add_row(layer.name, f"{layer.relative_error:.4f}")
    Console().print(table)
    print(f"it is in {destination}; serve it with: dalsegno serve {shlex.quote(_as_folder(destination))}")


def _as_folder(path: Path) -> str:
    """So written that it is a folder and no short name or hub id."""
    return str(path) if path.is_absolute() or path.parts[:1] in ((".",), ("..",)) else f"./{path}"
