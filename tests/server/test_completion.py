"""Shells complete commands, flags and the names of models."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from server.cli import run
from server.settings import all_keys


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """No model was made on this machine yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "dalsegno" / "models"


@pytest.fixture
def completed(monkeypatch, capsys):
    """How a line may go on, as fish is told: a word, and what it means."""

    monkeypatch.setenv("COLUMNS", "80")

    def complete(line: str) -> dict[str, str]:
        monkeypatch.setenv("_DALSEGNO_COMPLETE", "complete_fish")
        monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
        monkeypatch.setenv("_TYPER_COMPLETE_ARGS", line)
        assert run([]) == 0
        parts = (found.partition("\t") for found in capsys.readouterr().out.splitlines())
        return {word: meaning for word, _, meaning in parts}

    return complete


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("dalsegno ch", {"chat"}),
        ("dalsegno completion ", {"bash", "zsh", "fish"}),
        ("dalsegno serve sm", {"smollm2", "smollm2-nvfp4"}),
        ("dalsegno generate --model de", {"demo"}),
        ("dalsegno serve --log-f", {"--log-format"}),
        ("dalsegno serve --backend ", {"auto", "torch", "flashinfer"}),
    ],
)
def test_a_line_goes_on_as_the_command_line_is(completed, line, words):
    assert set(completed(line)) == words


def test_each_setting_has_its_flag_and_its_meaning_in_one_line(completed):
    found = completed("dalsegno serve --")
    keys = [key for key in all_keys() if key.flag.startswith("--")]
    assert {key.flag for key in keys} <= set(found)
    assert all(key.meaning in found[key.flag] for key in keys)


def test_models_that_were_made_here_are_known(completed, cache):
    (cache / "org--name-nvfp4").mkdir(parents=True)
    (cache / "org--name-nvfp4" / ".dalsegno-manifest").write_text("{}")
    assert set(completed("dalsegno rm ")) == {"org--name-nvfp4"}
    assert set(completed("dalsegno serve org")) == {"org--name-nvfp4"}


def test_bash_reads_the_script(tmp_path):
    command = tmp_path / "dalsegno"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m server "$@"\n')
    command.chmod(0o755)
    question = "COMP_WORDS=(dalsegno comp); COMP_CWORD=1; _dalsegno_completion dalsegno"
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    result = subprocess.run(
        ["bash", "-c", f'eval "$(dalsegno completion bash)"; {question}; echo "${{COMPREPLY[@]}}"'],
        capture_output=True, text=True, env=environment, check=True,
    )  # fmt: skip
    assert (result.stdout, result.stderr) == ("completion\n", "")


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_have_a_script_that_asks_the_same_way(capsys, shell):
    assert run(["completion", shell]) == 0
    assert f"_DALSEGNO_COMPLETE=complete_{shell}" in capsys.readouterr().out
