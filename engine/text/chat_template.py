"""A conversation to one prompt text, by the checkpoint's own chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class ChatTemplate:
    """A compiled chat template. Immutable, so any thread may use it."""

    @classmethod
    def load(cls, folder: Path) -> ChatTemplate | None:
        """From `chat_template.jinja` or `tokenizer_config.json`; None where neither has one.

        Raises ChatTemplateError (with the line) when it does not compile.
        """
        raise NotImplementedError

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt for `messages` (OpenAI's shape; content is a string, None, or a list of text parts).

        `variables` are the template's own, e.g. {"enable_thinking": False}. Raises ChatTemplateError with the line and
        what the template said.
        """
        raise NotImplementedError
