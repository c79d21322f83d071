"""`dalsegno list` and `dalsegno rm`: the models on this machine."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from server.commands.memory_table import size_text
from server.commands.model_names import complete_removable
from server.commands.options import with_settings
from server.configuration import ConfigurationError, Resolved

if TYPE_CHECKING:
    from engine.model_list import ListedModel


@with_settings()
def list_models(
    _resolved: Resolved,
    folder: Annotated[
        Path | None, typer.Argument(help="list the model folders that lie in this one as well", metavar="[FOLDER]")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print a JSON array")] = False,
) -> None:
    """Show the models that can be served, by the names that `serve` takes."""
    if folder is not None and not folder.is_dir():
        raise ConfigurationError(f"{folder}: there is no such folder")
    from engine.model_list import list_models as find_models

    models = list(find_models(folder))
    if as_json:
        print(json.dumps([asdict(model) for model in models], indent=2, default=str))
    else:
        _print_table(models)


@with_settings()
def rm(
    _resolved: Resolved,
    name: Annotated[
        str, typer.Argument(help="as `dalsegno list` shows it", metavar="NAME", autocompletion=complete_removable)
    ],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="don't ask")] = False,
) -> None:
    """Remove a model that dalsegno fetched or made. Folders of yours and the hub's cache are left alone."""
    from engine import model_store
    from engine.model_list import Keeper, describe

    if name not in model_store.names():
        raise ConfigurationError(f"{name} is not removed: {_why_not(name)}")
    model = describe(name, Keeper.STORE, model_store.store_root() / name)
    if not yes:
        if not sys.stdin.isatty():
            raise ConfigurationError("there is nobody to ask whether to remove it; add --yes")
        typer.confirm(f"Remove {model.folder} ({size_text(model.nbytes)})?", abort=True)
    model_store.remove(name)
    print(f"removed {name}: {size_text(model.nbytes)}")


def _why_not(name: str) -> str:
    from engine import model_store
    from engine.model_sources import cached_on_hub
    from engine.short_names import SHORT_NAMES, is_short

    if name in SHORT_NAMES and SHORT_NAMES[name].source is None:
        return "it is a part of dalsegno"
    if is_short(name):
        return "it was not fetched"
    if name in cached_on_hub():
        return f"the Hugging Face hub's own cache keeps it; `hf cache rm model/{name}` removes it there"
    if Path(name).exists():
        return "only what dalsegno fetched or made is; delete a folder of yours yourself"
    made = ", ".join(model_store.names()) or "nothing"
    return f"dalsegno made no model of that name; it made {made}"


def _print_table(models: Sequence[ListedModel]) -> None:
    from rich.table import Table

    from server.commands.consoles import standard_output

    table = Table("name", "architecture", "format", "size", "where", box=None, pad_edge=False)
    for model in models:
        where = "dalsegno pull fetches it" if model.folder is None else str(model.folder)
        size = size_text(model.nbytes) if model.nbytes else ""
        table.add_row(model.name, model.architecture, ", ".join(model.formats) or model.trouble, size, where)
    standard_output().print(table, markup=False)
