"""The sandbox that chat templates run in: what Hugging Face's templates expect, within bounds of time and size."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.errors import ChatTemplateError

_MAX_OPERAND_BITS = 512


class Watch:
    """The budget of one rendering. Each output piece is counted against it."""

    def __init__(self, limits: TemplateLimits) -> None:
        self._limits = limits
        self._deadline = time.monotonic() + limits.max_seconds
        self._characters = 0

    def count(self, characters: int) -> None:
        """Raises ChatTemplateError when the output grows too long or takes too long."""
        self._characters += characters
        if self._characters > self._limits.max_characters:
            raise ChatTemplateError(
                f"the chat template's output is longer than {self._limits.max_characters:,} characters"
            )
        if time.monotonic() > self._deadline:
            raise ChatTemplateError(f"the chat template ran for more than {self._limits.max_seconds:g} seconds")


@dataclass(frozen=True, slots=True)
class TemplateLimits:
    """How much one rendering may put out and how long it may take, checked at every piece of output."""

    max_characters: int = 64 * 1024 * 1024
    max_seconds: float = 10.0

    def start(self) -> Watch:
        return Watch(self)


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's text for training; for serving it is transparent."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Refuses the two operators by which one expression can fill the memory."""

    intercepted_binops = frozenset(["*", "**"])

    def __init__(self, limits: TemplateLimits) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
        self._max_characters = limits.max_characters

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            for sequence, times in ((left, right), (right, left)):
                if isinstance(sequence, str | list | tuple) and isinstance(times, int):
                    self._refuse_if(len(sequence) * times > self._max_characters, operator)
        elif isinstance(left, int) and isinstance(right, int):
            self._refuse_if(left.bit_length() * right > _MAX_OPERAND_BITS, operator)
        return super().call_binop(context, operator, left, right)

    def _refuse_if(self, is_too_large: bool, operator: str) -> None:
        if is_too_large:
            raise jinja2.exceptions.SecurityError(f"the result of {operator!r} would be too large")


def new_environment(limits: TemplateLimits) -> jinja2.Environment:
    """A sandbox set up as transformers sets up its own (trim_blocks, lstrip_blocks, tojson, raise_exception, ...)."""
    environment = _BoundedEnvironment(limits)
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _strftime_now(format_string: str) -> str:
    return datetime.now().strftime(format_string)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is; jinja2's own filter escapes HTML characters."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
