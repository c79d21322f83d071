"""Chat messages as a client sends them: text, tool calls and their results."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from server.exact_json import load_object
from server.schema.base import AtMost, RequestModel

MAX_PARTS = 4096
MAX_CALLS = 1024

_LATER_PARTS = (
    "image_url",
    "input_image",
    "image",
    "input_audio",
    "audio",
    "file",
    "input_file",
    "video_url",
)
_MAY_SAY_NOTHING = (None, "assistant", "tool", "function")
"""Without a role the error is about the role."""
_OLDER_ROLES = {"developer": "system", "function": "tool"}
"""As chat templates know them."""


def _check_part_type(kind: Any) -> Any:
    if isinstance(kind, str) and kind in _LATER_PARTS:
        raise PydanticCustomError("unsupported", "{kind} parts are not supported; send text", {"kind": kind})
    return kind


def _as_arguments(arguments: Any) -> str | dict[str, Any]:
    """What a model wrote is passed on, whatever it is: as an object where it is one, else as its text."""
    if arguments is None or arguments == "":
        return {}
    if isinstance(arguments, str):
        found = load_object(arguments)
        return arguments if found is None else found
    return arguments if isinstance(arguments, dict) else json.dumps(arguments, ensure_ascii=False)


def _content_kind(content: Any) -> str | None:
    if isinstance(content, str):
        return "text"
    return "parts" if isinstance(content, list) else None


class TextPart(RequestModel):
    """A part of a message: text, under any of its names."""

    type: Annotated[Literal["text", "input_text", "output_text", "refusal"], BeforeValidator(_check_part_type)]
    text: str | None = None
    refusal: str | None = None

    @model_validator(mode="after")
    def _check_text(self) -> TextPart:
        if self.type != "refusal" and "text" not in self.model_fields_set:
            raise PydanticCustomError("missing", "a text part needs a text")
        return self

    @property
    def words(self) -> str:
        return (self.refusal if self.type == "refusal" else self.text) or ""


Content = Annotated[
    Annotated[str, Tag("text")] | Annotated[list[TextPart], AtMost(MAX_PARTS), Tag("parts")],
    Discriminator(
        _content_kind,
        custom_error_type="content_type",
        custom_error_message="Input should be a string or an array of text parts",
    ),
]


class CalledFunction(RequestModel):
    """What an assistant called. `arguments` is the text of a JSON object; anything else is passed on as text."""

    name: str
    arguments: Any = ""

    def for_template(self) -> dict[str, Any]:
        """With the arguments as an object, as chat templates expect them."""
        return {"name": self.name, "arguments": _as_arguments(self.arguments)}


class ToolCall(RequestModel):
    """A call in an assistant's message."""

    id: str | None = None
    type: Literal["function"] | None = "function"
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        call: dict[str, Any] = {"type": "function", "function": self.function.for_template()}
        return call if self.id is None else {"id": self.id} | call


class FunctionDefinition(RequestModel):
    """A function that the model may call; `parameters` is a JSON Schema. Other fields reach the template as well."""

    model_config = ConfigDict(extra="allow")

    name: Annotated[str, Field(min_length=1, max_length=128)]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(RequestModel):
    """A tool of a request."""

    type: Literal["function"]
    function: FunctionDefinition


class ChatMessage(RequestModel):
    """One message of a conversation. What a model answered is taken back in whatever form: its message may have no
    content, and a result need not have its call beside it."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = Field(None, description="another name of reasoning_content")
    tool_calls: Annotated[list[ToolCall], AtMost(MAX_CALLS)] | None = None
    function_call: CalledFunction | None = Field(None, description="the older form of a single tool call")
    tool_call_id: str | None = None
    # After the fields that say whether it may be missing.
    content: Annotated[Content | None, Field(validate_default=True)] = None

    @field_validator("content")
    @classmethod
    def _check_content(cls, content: Any, info: ValidationInfo) -> Any:
        if content is None and info.data.get("role") not in _MAY_SAY_NOTHING:
            raise PydanticCustomError("content_missing", "Input should be a string or an array of text parts")
        return content

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates expect it: text parts joined, roles under their older names."""
        content = self.content if isinstance(self.content, str) else "".join(part.words for part in self.content or ())
        message: dict[str, Any] = {"role": _OLDER_ROLES.get(self.role, self.role), "content": content}
        if self.name is not None:
            message["name"] = self.name
        if self.role == "assistant":
            reasoning = self.reasoning if self.reasoning_content is None else self.reasoning_content
            if reasoning is not None:
                message["reasoning_content"] = reasoning
            calls = [call.for_template() for call in self.tool_calls or ()]
            if self.function_call is not None and not calls:
                calls = [{"type": "function", "function": self.function_call.for_template()}]
            if calls:
                message["tool_calls"] = calls
        if self.role == "tool" and self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message
