"""What goes wrong in the first quarter of an hour is told in one line, with what to do."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from engine.catalog import resolve_model
from engine.errors import InsufficientMemoryError, ModelLoadError, UnusableOptionError
from engine.memory import LEAST_CONTEXT_TOKENS, Ram, plan_memory
from engine.models.registry import read_config
from engine.options import EngineOptions
from server.cli import run

pytestmark = pytest.mark.usefixtures("quiet_logging")

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def empty(folder):
    folder.mkdir()


def gguf(folder):
    folder.mkdir()
    (folder / "model.Q4_K_M.gguf").write_bytes(b"GGUF")


def only_weights(folder):
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"")


def a_file(folder):
    folder.write_bytes(b"")


def broken_json(folder):
    folder.mkdir()
    (folder / "config.json").write_text("{", encoding="utf-8")


def a_list(folder):
    folder.mkdir()
    (folder / "config.json").write_text("[]", encoding="utf-8")


def no_tokenizer(folder):
    folder.mkdir()
    demo = resolve_model("demo")
    for file in demo.iterdir():
        if file.name != "tokenizer.json":
            (folder / file.name).symlink_to(file)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (empty, "has no config.json (it is empty)"),
        (gguf, "GGUF, which is not served; of a GGUF model, serve what it was made from"),
        (only_weights, "has no config.json (it holds model.safetensors)"),
        (a_file, "is a file; give the folder"),
        (broken_json, "config.json: not valid JSON"),
        (a_list, "expected a JSON object"),
        (no_tokenizer, "tokenizer.json is missing"),
    ],
)
def test_a_model_that_is_none_says_why_in_one_line(capsys, tmp_path, make, said):
    make(tmp_path / "model")
    assert run(["serve", str(tmp_path / "model"), "--port", "0"]) == 3
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error


def test_a_gguf_file_is_told_apart_from_a_folder(tmp_path):
    gguf(tmp_path / "model")
    with pytest.raises(ModelLoadError, match="is a GGUF file, which is not served"):
        resolve_model(str(tmp_path / "model" / "model.Q4_K_M.gguf"))


def test_a_folder_that_may_not_be_read_is_no_model(tmp_path):
    folder = tmp_path / "model"
    broken_json(folder)
    folder.chmod(0)
    me = os.geteuid()
    try:
        if me == 0:
            os.seteuid(65534)  # nobody: root may read everything
        with pytest.raises(ModelLoadError, match="Permission denied"):
            resolve_model(str(folder))
    finally:
        os.seteuid(me)
        folder.chmod(0o700)


class Interrupt:
    """Ctrl-C at the moment when a module is looked for."""

    script = (
        "import sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name == {module!r}: raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Finder())\n"
        "sys.argv = ['dalsegno', 'serve', '--port', '0']\n"
        "import server.__main__\n"
    )


@pytest.mark.parametrize("module", ["server.verbs", "typer", "server.runner"])
def test_ctrl_c_while_it_starts_leaves_no_traceback(module):
    script = Interrupt.script.format(module=module)
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (130, "")


def plan(options, available_bytes=2**28):
    config = read_config(resolve_model("demo"))
    return plan_memory(config, options, available_bytes, element_bytes=4, ram=Ram(2**30, 2**30))


def test_pages_that_hold_no_conversation_are_refused_unless_so_short_a_context_is_asked_for():
    for options, said in (
        (EngineOptions(kv_pages=1), r"--kv-pages is 1 \(16 tokens\); a context of 256 .* needs 16 pages; raise it"),
        (EngineOptions(kv_pages=15), r"--kv-pages is 15 \(240 tokens\)"),
    ):
        with pytest.raises(UnusableOptionError, match=said):
            plan(options)
    assert plan(EngineOptions(kv_pages=16)).max_context_tokens == LEAST_CONTEXT_TOKENS
    assert plan(EngineOptions(kv_pages=1, max_context=16)).max_context_tokens == 16


@pytest.mark.parametrize("name", ["kv_pages", "kv_cache_mib", "host_cache_mib"])
def test_what_is_too_large_is_told_the_largest_that_fits(name):
    with pytest.raises(InsufficientMemoryError) as caught:
        plan(EngineOptions(**{name: 10**7}))
    flag, largest = re.search(r"lower (--[a-z-]+) to (\d+) or less", str(caught.value)).groups()
    assert flag == f"--{name.replace('_', '-')}"
    plan(EngineOptions(**{name: int(largest)}))
    with pytest.raises(InsufficientMemoryError):
        plan(EngineOptions(**{name: int(largest) + 1}))


def test_quantize_says_what_comes_next(capsys, monkeypatch, tmp_path, tiny_model):
    monkeypatch.chdir(tmp_path)
    assert run(["quantize", str(tiny_model), "copy"]) == 0
    assert "serve it with: dalsegno serve ./copy" in capsys.readouterr().out
    assert run(["quantize", "demo", "other"]) == 3
    assert "it can be served as it is" in capsys.readouterr().err


def test_the_readme_makes_the_command_known_before_it_is_used():
    start = README[README.index("## Start") :]
    assert start.index("second terminal") < start.index(". .venv/bin/activate") < start.index("dalsegno chat")
