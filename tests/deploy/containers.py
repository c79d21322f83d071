"""The Dockerfile and the compose file that are shipped, read into what the tests ask about."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from tests.deploy.prometheus_files import DEPLOY, load

ROOT = DEPLOY.parent
DOCKERFILE = ROOT / "Dockerfile"
COMPOSE = DEPLOY / "compose.yaml"
TARGETS = ("cpu", "cuda")


@dataclass
class Stage:
    """One `FROM ... AS name` with its instructions, continuation lines joined."""

    name: str
    base: str
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def all(self, keyword: str) -> list[str]:
        return [rest for found, rest in self.instructions if found == keyword]

    def one(self, keyword: str) -> str:
        [rest] = self.all(keyword)
        return rest

    @property
    def environment(self) -> dict[str, str]:
        return dict(re.findall(r"(\w+)=(\S+)", " ".join(self.all("ENV"))))


def read_stages() -> dict[str, Stage]:
    """By name."""
    stages: dict[str, Stage] = {}
    current: Stage | None = None
    for keyword, rest in _instructions():
        if keyword == "FROM":
            base, _as, name = rest.split()
            current = stages[name] = Stage(name, base)
        elif current is not None:
            current.instructions.append((keyword, rest))
    return stages


def global_arguments() -> dict[str, str]:
    """The arguments before the first stage, with their defaults."""
    found: dict[str, str] = {}
    for keyword, rest in _instructions():
        if keyword == "FROM":
            return found
        assert keyword == "ARG", keyword
        name, _equals, default = rest.partition("=")
        found[name] = default
    return found


def services() -> dict[str, Any]:
    return load(COMPOSE)["services"]


def _instructions() -> list[tuple[str, str]]:
    text = DOCKERFILE.read_text(encoding="utf-8")
    lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    joined = re.sub(r"\\\n\s*", "", lines)
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in joined.splitlines() if line.strip()]
