"""The house keeps its own rules: dependencies explained and pinned, imports one way, no module without a purpose."""

from __future__ import annotations

import ast
import re
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
