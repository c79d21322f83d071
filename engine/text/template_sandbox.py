"""The sandbox that chat templates run in: what Hugging Face's templates expect, within bounds of time and size."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
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
        self._characters = 0
        self._seconds = 0.0
        self._went_on_at = time.thread_time()

    def count(self, characters: int) -> None:
        """Raises ChatTemplateError when the output grows too long or takes too long."""
        self._characters += characters
        if self._characters > self._limits.max_characters:
            raise ChatTemplateError(
                f"the chat template's output is longer than {self._limits.max_characters:,} characters"
            )
        if self._seconds + time.thread_time() - self._went_on_at > self._limits.max_seconds:
            raise ChatTemplateError(f"the chat template ran for more than {self._limits.max_seconds:g} seconds")

    def pause(self) -> None:
        self._seconds += time.thread_time() - self._went_on_at

    def go_on(self) -> None:
        """After a pause, in whatever thread."""
        self._went_on_at = time.thread_time()


@dataclass(frozen=True, slots=True)
class TemplateLimits:
    """How much one rendering may put out and how much processor time it may take, checked at every piece of output."""

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
    """Refuses the two operators by which one expression can fill the memory, and marks a template's own literals."""

    intercepted_binops = frozenset(["*", "**"])

    def __init__(self, limits: TemplateLimits, mark: Callable[[str], str]) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
        self._max_characters = limits.max_characters
        self._mark = mark

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for text in tree.find_all(nodes.TemplateData):
            text.data = self._mark(text.data)
        for constant in tree.find_all(nodes.Const):
            if isinstance(constant.value, str):
                constant.value = self._mark(constant.value)
        return tree

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


def new_environment(limits: TemplateLimits, mark: Callable[[str], str]) -> jinja2.Environment:
    """A sandbox set up as transformers sets up its own (trim_blocks, lstrip_blocks, tojson, raise_exception, ...).

    `mark` is what each literal of a template becomes.
    """
    environment = _BoundedEnvironment(limits, mark)
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
