"""The models that can be served from this machine, and those that have a short name and are not fetched yet."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from engine import model_store
from engine.catalog import bundled_folder
from engine.errors import ModelLoadError
from engine.model_sources import cached_on_hub
from engine.models.registry import read_config
from engine.short_names import SHORT_NAMES, all_short_names
from engine.weights.inspect import inspect_checkpoint

_LEAST_SHARE = 0.05
"""Of a model's bytes that a format has, to be named."""


class Keeper(StrEnum):
    """Who keeps a model's files."""

    PACKAGE = "package"
    STORE = "store"
    """Made on this machine, in the user's cache: what `dalsegno rm` removes."""
    HUB = "hub"
    FOLDER = "folder"
    NOBODY = "not fetched"


@dataclass(frozen=True, slots=True)
class ListedModel:
    """A model by the name that `dalsegno serve` takes. What its files do not tell is empty."""

    name: str
    keeper: Keeper
    folder: Path | None
    nbytes: int
    """Of all its files, or those that it will have once it is fetched; 0 where that is not known."""
    architecture: str = ""
    formats: tuple[str, ...] = ()
    """Those that matter for its size, the largest first."""
    trouble: str = ""
    """Why it cannot be served."""


def list_models(folder: Path | None = None) -> Iterator[ListedModel]:
    """Every model here: those with a short name, those that were made here, those of the hub that are complete, and
    the model folders that lie in `folder`."""
    stored = model_store.names()
    for name in all_short_names():
        if name in stored:
            continue
        if name in SHORT_NAMES and SHORT_NAMES[name].source is None:
            yield describe(name, Keeper.PACKAGE, bundled_folder(name))
        else:
            nbytes = SHORT_NAMES[name].stored_bytes if name in SHORT_NAMES else 0
            yield ListedModel(name, Keeper.NOBODY, None, nbytes)
    for name in stored:
        yield describe(name, Keeper.STORE, model_store.store_root() / name)
    for repo_id, snapshot in cached_on_hub().items():
        yield describe(repo_id, Keeper.HUB, snapshot)
    if folder is not None:
        for config in sorted(folder.glob("*/config.json")):
            yield describe(str(config.parent), Keeper.FOLDER, config.parent)


def describe(name: str, keeper: Keeper, folder: Path) -> ListedModel:
    """Tell what a model is from its headers; its weights are not read."""
    nbytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    try:
        config, summary = read_config(folder), inspect_checkpoint(folder)
    except ModelLoadError as error:
        return ListedModel(name, keeper, folder, nbytes, trouble=str(error))
    formats = tuple(part.name for part in summary.formats if part.nbytes >= _LEAST_SHARE * summary.nbytes)
    return ListedModel(name, keeper, folder, nbytes, config.architecture, formats)
