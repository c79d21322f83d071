"""The house keeps its own rules: dependencies explained and pinned, imports one way, no module without a purpose."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PACKAGES = ("server", "engine", "cache", "ops", "bench", "training")
MODULES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def _names(requirements):
    return {re.split(r"[\[>=<~! ]", line)[0].lower().replace("_", "-") for line in requirements}


@pytest.mark.parametrize("extra", [None, *PROJECT["optional-dependencies"]])
def test_every_dependency_is_explained(extra):
    requirements = PROJECT["dependencies"] if extra is None else PROJECT["optional-dependencies"][extra]
    text = (ROOT / "docs/dependencies.md").read_text()
    explained = {name.split("[")[0] for name in re.findall(r"`([^`]+)`", text)}
    assert _names(requirements) - explained == set()


def test_every_dependency_that_make_installs_is_pinned():
    wanted = _names([*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dev"]])
    pinned = _names((ROOT / "constraints.txt").read_text().splitlines())
    assert wanted - pinned == set()


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_module_says_in_its_first_line_why_it_exists(path):
    tree = ast.parse(path.read_text())
    assert (not tree.body and path.name == "__init__.py") or ast.get_docstring(tree)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_module_outgrows_one_reason(path):
    assert len(path.read_text().splitlines()) <= 400


REGISTRY_HOSTS = (
    "pypi.org",
    "pythonhosted.org",
    "pytorch.org/whl",
    "registry.npmjs",
    "docker.io",
    "ghcr.io",
    "nvcr.io",
)
"""Where packages come from is the affair of whoever installs them."""


def test_no_file_names_the_host_of_a_registry():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True).stdout
    files = [ROOT / name for name in listed.split("\0") if name and not name.endswith((".safetensors", ".png"))]
    texts = {path.relative_to(ROOT): path.read_text(errors="replace") for path in files if path.is_file()}
    me = Path("tests/test_house.py")
    assert [
        f"{path}: {host}" for path, text in texts.items() if path != me for host in REGISTRY_HOSTS if host in text
    ] == []
