"""Where a conversation is likely to be resumed, as places in what its template wrote."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cache import CheckpointKind
from engine.errors import ChatTemplateError
from engine.text.chat_template import ChatTemplate
from engine.text.slices import Slices

_LEADING_ROLES = frozenset({"system", "developer"})
_PROBE = {"role": "user", "content": "\N{FULL BLOCK}"}
"""Stands for any question, where a template refuses a conversation without one."""


def marked_places(
    template: ChatTemplate,
    text: str,
    messages: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any],
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> Slices[dict[int, CheckpointKind]]:
    """The end of the leading system messages, and the last boundary before the assistant's turn opens.

    `text` is what the template wrote for the conversation; keys are places in it, in characters, each before its end. A
    place that this template does not have is left out.
    """
    places: dict[int, CheckpointKind] = {}
    closure = yield from _try(template, messages, variables, tools)
    if closure and len(closure) < len(text) and text.startswith(closure):
        places[len(closure)] = CheckpointKind.PRIVATE_TURN_CLOSURE
    stable = yield from _stable_text(template, messages, variables, tools)
    if stable and len(stable) < len(text) and text.startswith(stable):
        places[len(stable)] = CheckpointKind.SHARED_STABLE_PREFIX
    return places


def _stable_text(
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any],
    tools: Sequence[Mapping[str, Any]] | None,
) -> Slices[str]:
    count = 0
    while count < len(messages) and messages[count].get("role") in _LEADING_ROLES:
        count += 1
    if count == 0:
        return ""
    leading = messages[:count]
    alone = yield from _try(template, leading, variables, tools)
    if alone:
        return alone
    return (yield from _try(template, [*leading, _PROBE], variables, tools)).partition(_PROBE["content"])[0]


def _try(
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any],
    tools: Sequence[Mapping[str, Any]] | None,
) -> Slices[str]:
    """Without the generation prompt; empty where the template refuses these messages."""
    try:
        return (yield from template.write(messages, tools=tools, variables=variables, add_generation_prompt=False))
    except ChatTemplateError:
        return ""
