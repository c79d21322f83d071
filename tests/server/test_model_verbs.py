"""`dalsegno list` and `dalsegno rm`."""

from __future__ import annotations

import io
import json
import shutil

import pytest

from engine import model_sources, model_store
from server.cli import run

pytestmark = pytest.mark.usefixtures("quiet_logging")


@pytest.fixture(autouse=True)
def no_hub(monkeypatch, tmp_path):
    """Nothing in the hub library's cache."""
    monkeypatch.setattr(model_sources, "scan_cache_dir", lambda: _scan(tmp_path / "hub"))


def _scan(folder):
    from huggingface_hub import scan_cache_dir

    return scan_cache_dir(folder)


@pytest.fixture
def made(tmp_path, monkeypatch, tiny_model):
    """A model that was made here under the name `made`; its folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return model_store.make("made", lambda folder: shutil.copytree(tiny_model, folder))


def listed(capsys, *flags):
    assert run(["list", "--json", *flags]) == 0
    return {model["name"]: model for model in json.loads(capsys.readouterr().out)}


def test_each_model_has_its_format_its_size_and_who_keeps_it(capsys, made, tiny_model, tmp_path):
    broken = tmp_path / "mine" / "broken"
    broken.mkdir(parents=True)
    (broken / "config.json").write_text('{"model_type": "bert"}')
    shutil.copytree(tiny_model, tmp_path / "mine" / "tiny")
    models = listed(capsys, str(tmp_path / "mine"))
    nbytes = sum(path.stat().st_size for path in made.iterdir())
    assert list(models) == [
        *("demo", "smollm2", "smollm2-nvfp4", "made"),
        *(str(broken), str(tmp_path / "mine" / "tiny")),
    ]
    assert models["demo"]["keeper"] == "package"
    assert models["demo"]["formats"][0] == "NVFP4 (ModelOpt)"
    assert (models["smollm2"]["keeper"], models["smollm2"]["folder"]) == ("not fetched", None)
    assert models["made"] == {
        "name": "made",
        "keeper": "store",
        "folder": str(made),
        "nbytes": nbytes,
        "architecture": "qwen3_5",
        "formats": ["float32"],
        "trouble": "",
    }
    assert "bert" in models[str(broken)]["trouble"]
    assert run(["list"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["made", "qwen3_5", "float32"] in [words[:3] for words in lines]


@pytest.mark.usefixtures("made")
def test_a_model_that_was_made_here_is_served_by_its_name(capsys):
    assert run(["inspect", "made"]) == 0
    assert "qwen3_5" in capsys.readouterr().out


def test_a_damaged_one_is_not_served(capsys, made):
    (made / "config.json").write_text("{}")
    assert run(["inspect", "made"]) == 3
    assert "`dalsegno rm made`" in capsys.readouterr().err


def test_rm_removes_what_was_made_here_and_its_name(capsys, made):
    assert run(["rm", "made", "--yes"]) == 0
    assert "removed made" in capsys.readouterr().out
    assert not made.exists()
    assert [path.name for path in made.parent.iterdir()] == ["made.lock"]
    assert run(["rm", "made", "--yes"]) == 2


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("demo", "it is a part of dalsegno"),
        ("smollm2", "it was not fetched"),
        ("{mine}", "delete a folder of yours yourself"),
        ("../models/made", "dalsegno made no model of that name; it made made"),
        (".", "delete a folder of yours yourself"),
        ("made.lock", "it made made"),
    ],
)
def test_rm_leaves_everything_else_alone(capsys, made, tiny_model, name, said):
    assert run(["rm", name.format(mine=tiny_model), "--yes"]) == 2
    assert said in capsys.readouterr().err
    assert (made / "config.json").exists()
    assert (tiny_model / "config.json").exists()


class Typed(io.StringIO):
    """What a person types."""

    def isatty(self) -> bool:
        return True


def test_rm_asks_first_and_does_nothing_where_nobody_can_answer(capsys, made, monkeypatch):
    assert run(["rm", "made"]) == 2
    assert "add --yes" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin", Typed("n\n"))
    assert run(["rm", "made"]) == 1
    assert f"Remove {made}" in capsys.readouterr().out
    assert made.exists()
    monkeypatch.setattr("sys.stdin", Typed("y\n"))
    assert run(["rm", "made"]) == 0
    assert not made.exists()
