"""The chat template of the bundled model, rendered as transformers renders it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template
from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

BUNDLE = Path(__file__).parents[2] / "engine" / "bundled" / "demo"


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


@lru_cache(maxsize=1)
def _template() -> Template:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    return environment.from_string((BUNDLE / "chat_template.jinja").read_text(encoding="utf-8"))


def render(
    messages: Sequence[dict[str, Any]],
    tools: Sequence[dict[str, Any]] = (),
    add_generation_prompt: bool = False,
    enable_thinking: bool = False,
) -> str:
    return _template().render(
        messages=list(messages),
        tools=list(tools) or None,
        add_generation_prompt=add_generation_prompt,
        enable_thinking=enable_thinking,
    )
