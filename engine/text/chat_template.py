"""A conversation to one prompt text, by the checkpoint's own chat template."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2

from engine.errors import ChatTemplateError
from engine.text.control_tokens import ControlTokens, only_text
from engine.text.slices import Slices, in_one_go
from engine.text.template_sandbox import TemplateLimits, new_environment
from engine.text.tokenizer import read_special_tokens, read_tokenizer_config

_DEFAULT_NAME = "default"
_TOOL_USE_NAME = "tool_use"
_PIECES_IN_A_SLICE = 512
_PROBES: tuple[list[dict[str, Any]], ...] = (
    [{"role": "user", "content": "a"}],
    [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}],
    [
        {"role": "user", "content": "a"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "b", "type": "function", "function": {"name": "c", "arguments": {"d": "e"}}}],
        },
        {"role": "tool", "tool_call_id": "b", "name": "c", "content": "f"},
    ],
)
"""Conversations that show which tokens a template writes."""
_PROBE_TEXT = "\N{FULL BLOCK}"


class ChatTemplate:
    """Compiled chat templates of one checkpoint. Immutable, so any thread may use it."""

    def __init__(
        self,
        sources: Mapping[str, str],
        special_tokens: Mapping[str, str] | None = None,
        control_tokens: Iterable[str] = (),
    ) -> None:
        """`sources` by name; `default` is used for chats, `tool_use` (where there is one) for chats with tools.

        `control_tokens` are those that only the template may write; one that is spelled out in a message is text.
        Raises ChatTemplateError with the line when one does not compile.
        """
        named = dict(special_tokens or {})
        self._control_tokens = tuple(control_tokens)
        written = [*sources.values(), *named.values()]
        self._controls = ControlTokens(
            token for token in self._control_tokens if any(token in text for text in written)
        )
        self._special_tokens = {name: self._controls.mark(token) for name, token in named.items()}
        self._limits = TemplateLimits()
        environment = new_environment(self._limits, self._controls.mark)
        self._templates = {name: _compile(environment, name, source) for name, source in sources.items()}
        if _DEFAULT_NAME not in self._templates and len(self._templates) != 1:
            names = ", ".join(sorted(self._templates)) or "none"
            raise ChatTemplateError(f"no chat template is named {_DEFAULT_NAME!r}; the checkpoint has: {names}")

    @classmethod
    def load(cls, folder: Path, control_tokens: Iterable[str] = ()) -> ChatTemplate | None:
        """From `chat_template.jinja` or `tokenizer_config.json`; None where neither has one.

        Raises ChatTemplateError (with the line) when it does not compile, ModelLoadError for an unreadable file.
        """
        sources = _read_sources(folder)
        return cls(sources, read_special_tokens(folder), control_tokens) if sources is not None else None

    @property
    def stand_ins(self) -> Mapping[str, str]:
        """What `write` has in the place of each control token of the template."""
        return self._controls.stand_ins

    @cached_property
    def composed_tokens(self) -> frozenset[str]:
        """Control tokens that the template puts together from parts, such as '<|' + role + '|>': they have no stand-in
        in what it writes, so they cannot be told from those in a message."""
        found: set[str] = set()
        for messages in _PROBES:
            try:
                text = in_one_go(self.write(messages))
            except ChatTemplateError:
                continue
            found.update(token for token in self._control_tokens if token in text)
        return frozenset(found)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """What `write` writes, as it reads, and in one go."""
        work = self.write(messages, tools=tools, add_generation_prompt=add_generation_prompt, variables=variables)
        return self._controls.spell(in_one_go(work))

    def write(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> Slices[str]:
        """The prompt for `messages` (OpenAI's shape; content is a string, None, or a list of text parts), with a
        stand-in for each control token of the template's own.

        `variables` are the template's, e.g. {"enable_thinking": False}. Raises ChatTemplateError with the line and
        what the template said.
        """
        is_wrapped = any(_has_text_arguments(message) for message in messages) and not self._takes_text_arguments
        messages = [_with_wrapped_arguments(message) for message in messages] if is_wrapped else messages
        return (yield from self._write(messages, tools, add_generation_prompt, variables or {}))

    @cached_property
    def _takes_text_arguments(self) -> bool:
        """Whether it writes the arguments of a tool call also where they are text and no object."""
        called = {"id": "b", "type": "function", "function": {"name": "c", "arguments": _PROBE_TEXT}}
        asked, answered = {"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [called]}
        try:
            return _PROBE_TEXT in in_one_go(self._write([asked, answered], None, False, {}))
        except ChatTemplateError:
            return False

    def _write(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> Slices[str]:
        name = _TOOL_USE_NAME if tools and _TOOL_USE_NAME in self._templates else _DEFAULT_NAME
        template = self._templates.get(name) or next(iter(self._templates.values()))
        watch = self._limits.start()
        pieces: list[str] = []
        try:
            context = {
                **self._special_tokens,
                **only_text(variables),
                "messages": [only_text(_with_plain_content(message)) for message in messages],
                "tools": only_text(list(tools)) if tools else None,
                "documents": None,
                "add_generation_prompt": add_generation_prompt,
            }
            for piece in template.generate(context):
                watch.count(len(piece))
                pieces.append(piece)
                if len(pieces) % _PIECES_IN_A_SLICE == 0:
                    watch.pause()
                    yield False
                    watch.go_on()
        except ChatTemplateError:
            raise
        except Exception as error:  # a template can fail in any way that Python can
            said = self._controls.spell(_what_it_said(error))
            raise ChatTemplateError(f"the chat template failed{_line_of(error)}: {said}") from error
        return "".join(pieces)


def _read_sources(folder: Path) -> dict[str, str] | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return {_DEFAULT_NAME: path.read_text(encoding="utf-8")}
        except (OSError, UnicodeDecodeError) as error:
            raise ChatTemplateError(f"{path} cannot be read as UTF-8 text: {error}") from error
    found = read_tokenizer_config(folder).get("chat_template")
    if found is None:
        return None
    if isinstance(found, str):
        return {_DEFAULT_NAME: found}
    if isinstance(found, list):
        named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
        if len(named) == len(found) and all(isinstance(text, str) for pair in named.items() for text in pair):
            return {str(name): str(template) for name, template in named.items()}
    raise ChatTemplateError(
        f"{folder / 'tokenizer_config.json'}: chat_template must be a string or a list of "
        '{"name": ..., "template": ...} objects'
    )


def _compile(environment: jinja2.Environment, name: str, source: str) -> jinja2.Template:
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ChatTemplateError(
            f"the chat template {name!r} is broken at line {error.lineno}: {error.message}"
        ) from error


def _has_text_arguments(message: Mapping[str, Any]) -> bool:
    return any(isinstance(call["function"].get("arguments"), str) for call in message.get("tool_calls") or ())


def _with_wrapped_arguments(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Text where a template takes objects only: the one argument of a call, so that what the model wrote is there."""
    if not _has_text_arguments(message):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        if isinstance(function.get("arguments"), str):
            call = {**call, "function": {**function, "arguments": {"arguments": function["arguments"]}}}
        calls.append(call)
    return {**message, "tool_calls": calls}


def _with_plain_content(message: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `message` whose text parts are joined by newlines: templates written for strings take both."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return dict(message)
    if not isinstance(content, Sequence):
        raise ChatTemplateError(f"message content must be a string or a list of parts, not {type(content).__name__}")
    texts: list[str] = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) else part
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise ChatTemplateError(f"a message has a content part of type {kind!r}; this model takes text parts only")
        texts.append(text)
    return {**message, "content": "\n".join(texts)}


def _line_of(error: Exception) -> str:
    if isinstance(error, jinja2.TemplateSyntaxError):
        return f" at line {error.lineno}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "<template>"]
    return f" at line {frames[-1].lineno}" if frames else ""


def _what_it_said(error: Exception) -> str:
    return str(error) or type(error).__name__
