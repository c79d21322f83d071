"""Models made on this machine, in the user's cache: each appears whole or not at all, and is checked before use."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from engine.errors import ModelLoadError

_MANIFEST = ".dalsegno-manifest"

logger = logging.getLogger("dalsegno.models")

Build = Callable[[Path], None]
"""Makes a model in the folder given, which does not exist yet. The folder's parent is scratch space."""


def store_root() -> Path:
    """`$XDG_CACHE_HOME/dalsegno/models`, or `~/.cache/dalsegno/models` where that variable is unset or not absolute."""
    configured = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        base = configured if configured.is_absolute() else Path.home() / ".cache"
    except RuntimeError as error:
        raise ModelLoadError("this user has no home folder; set XDG_CACHE_HOME to where models may be kept") from error
    return base / "dalsegno" / "models"


def find(name: str) -> Path | None:
    """The folder of a model made before, its files read and compared with what was recorded; None where there is none
    or it is damaged (which is logged)."""
    folder = store_root() / name
    if not folder.is_dir():
        return None
    damage = _damage(folder)
    if damage is not None:
        logger.warning("%s is damaged (%s); it has to be made again", folder, damage)
        return None
    return folder


def names() -> tuple[str, ...]:
    """Of the models that were made here, sound or not."""
    return tuple(sorted(path.parent.name for path in store_root().glob(f"[!.]*/{_MANIFEST}")))


def remove(name: str) -> None:
    """Delete a model that was made here. Who has it loaded keeps it; who makes it is waited for."""
    root = store_root()
    scratch = root / f".{name}.partial"
    try:
        with _locked(root / f"{name}.lock", name):
            shutil.rmtree(scratch, ignore_errors=True)
            (root / name).rename(scratch)
            shutil.rmtree(scratch)
    except OSError as error:
        raise ModelLoadError(f"{root / name} cannot be removed ({error.strerror or error})") from error


def make(name: str, build: Build, *, needed_bytes: int = 0, force: bool = False) -> Path:
    """The folder of model `name`, made by `build` unless it is there and sound; `force` makes it again.

    One process builds, others wait for it. Whatever interrupts the building, the model that was there before stays, or
    none. Raises ModelLoadError where the cache cannot be written or has less than `needed_bytes` free.
    """
    if not force and (folder := find(name)) is not None:
        return folder
    root = store_root()
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root / f"{name}.lock", name):
            _finish_interrupted_swap(root, name)
            if not force and (folder := find(name)) is not None:
                return folder
            return _build(root, name, build, needed_bytes)
    except OSError as error:
        raise _cannot_write(root, error, needed_bytes) from error


@contextmanager
def _locked(path: Path, name: str) -> Iterator[None]:
    """Hold the lock on `name`. It ends with its process, however that ends."""
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        logger.info("another process is making %s; waiting for it", name)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _build(root: Path, name: str, build: Build, needed_bytes: int) -> Path:
    free_bytes = shutil.disk_usage(root).free
    if free_bytes < needed_bytes:
        raise _no_space(root, needed_bytes, free_bytes)
    scratch, target, old = root / f".{name}.partial", root / name, root / f".{name}.old"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    try:
        made = scratch / "model"
        build(made)
        _seal(made)
        if target.exists():
            target.rename(old)
        made.rename(target)
        _sync(root)
    finally:
        _finish_interrupted_swap(root, name)
        shutil.rmtree(scratch, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)
    return target


def _finish_interrupted_swap(root: Path, name: str) -> None:
    """Put the model that was there before back, where the building ended between its removal and the new one."""
    target, old = root / name, root / f".{name}.old"
    if old.exists() and not target.exists():
        old.rename(target)


def _seal(folder: Path) -> None:
    """Record sizes and sums of all files, and push everything to the disk."""
    files = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.name != _MANIFEST):
        path.chmod(0o644)
        files[str(path.relative_to(folder))] = {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
        _sync(path)
    manifest = folder / _MANIFEST
    manifest.write_text(json.dumps({"files": files}, indent=2) + "\n")
    _sync(manifest)
    _sync(folder)


def _damage(folder: Path) -> str | None:
    """What is wrong with a sealed folder; None where nothing is."""
    try:
        files = json.loads((folder / _MANIFEST).read_text())["files"]
        for name, expected in files.items():
            path = folder / name
            if not path.is_file():
                return f"{name} is missing"
            size = path.stat().st_size
            if size != expected["bytes"]:
                return f"{name} has {size:,} bytes; expected {expected['bytes']:,}"
            if sha256_of(path) != expected["sha256"]:
                return f"the contents of {name} have changed"
    except FileNotFoundError:
        return f"{_MANIFEST} is missing"
    except OSError as error:
        return f"{error.filename} cannot be read: {error.strerror}"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{_MANIFEST} cannot be read"
    return None


def sha256_of(path: Path) -> str:
    """Hexadecimal SHA-256 of a file's contents."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _no_space(root: Path, needed_bytes: int, free_bytes: int) -> ModelLoadError:
    return ModelLoadError(
        f"{root}: the model needs {needed_bytes:,} bytes but {free_bytes:,} are free; make room, or set XDG_CACHE_HOME "
        "to a folder on a larger disk"
    )


def _cannot_write(root: Path, error: OSError, needed_bytes: int) -> ModelLoadError:
    if error.errno == errno.ENOSPC:
        return _no_space(root, needed_bytes, shutil.disk_usage(root).free)
    return ModelLoadError(
        f"{root}: the model cache cannot be written ({error.strerror or error}); set XDG_CACHE_HOME to another folder"
    )
