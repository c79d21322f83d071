"""Chat messages as a client sends them: text, tool calls and their results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import orjson
from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    field_validator,
)
from pydantic_core import PydanticCustomError

from server.errors import ApiError
from server.schema.base import RequestModel

_LATER_PARTS = (
    "image_url",
    "input_image",
    "image",
    "input_audio",
    "audio",
    "file",
    "input_file",
    "video_url",
    "refusal",
)


def _check_role(role: Any) -> Any:
    if role == "function":
        raise PydanticCustomError("unsupported", "messages of role function are not supported; send role tool")
    return role


def _check_part_type(kind: Any) -> Any:
    if isinstance(kind, str) and kind in _LATER_PARTS:
        raise PydanticCustomError("unsupported", "{kind} parts are not supported; send text", {"kind": kind})
    return kind


def _check_arguments(arguments: str) -> str:
    if arguments and not isinstance(_json_or_none(arguments), dict):
        raise PydanticCustomError("arguments", "the arguments must be the text of a JSON object")
    return arguments


def _json_or_none(text: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return None


def _content_kind(content: Any) -> str | None:
    if isinstance(content, str):
        return "text"
    return "parts" if isinstance(content, list) else None


class TextPart(RequestModel):
    """A part of a message."""

    type: Annotated[Literal["text"], BeforeValidator(_check_part_type)]
    text: str


Content = Annotated[
    Annotated[str, Tag("text")] | Annotated[list[TextPart], Tag("parts")],
    Discriminator(
        _content_kind,
        custom_error_type="content_type",
        custom_error_message="Input should be a string or an array of text parts",
    ),
]


class CalledFunction(RequestModel):
    """What an assistant called. `arguments` is the text of a JSON object, or empty."""

    name: Annotated[str, Field(min_length=1)]
    arguments: Annotated[str, AfterValidator(_check_arguments)] = ""


class ToolCall(RequestModel):
    """A call in an assistant's message."""

    id: Annotated[str, Field(min_length=1)]
    type: Literal["function"] = "function"
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        """With the arguments as an object, as chat templates expect them."""
        arguments = _json_or_none(self.function.arguments) or {}
        return {"id": self.id, "type": self.type, "function": {"name": self.function.name, "arguments": arguments}}


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
    """One message of a conversation. Only an assistant's message with tool calls may have no content."""

    role: Annotated[Literal["system", "developer", "user", "assistant", "tool"], BeforeValidator(_check_role)]
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    # After the fields that say whether it may be missing.
    content: Annotated[Content | None, Field(validate_default=True)] = None

    @field_validator("content")
    @classmethod
    def _check_content(cls, content: Any, info: ValidationInfo) -> Any:
        if content is None and not (info.data.get("role") == "assistant" and info.data.get("tool_calls")):
            raise PydanticCustomError("content_missing", "Input should be a string or an array of text parts")
        return content

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates expect it: text parts joined, `developer` under its older name `system`."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content or ())
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": content}
        if self.role == "assistant":
            if self.reasoning_content is not None:
                message["reasoning_content"] = self.reasoning_content
            if self.tool_calls:
                message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        if self.role == "tool" and self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message


def check_tool_order(messages: Sequence[ChatMessage]) -> None:
    """Each tool message answers a call of the assistant's message before it, and each call is answered, once.

    Raises ApiError (400) that names the message.
    """
    open_calls: list[str] = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if message.role == "tool":
            if not open_calls:
                raise _out_of_order(f"{where}.role", "a tool message must follow an assistant message with tool_calls")
            if message.tool_call_id not in open_calls:
                raise _out_of_order(f"{where}.tool_call_id", "it must be the id of a call that has no result yet")
            open_calls.remove(message.tool_call_id)
            continue
        if open_calls:
            raise _out_of_order(f"{where}.role", f"{len(open_calls)} tool calls before it have no tool message yet")
        if message.tool_calls and message.role != "assistant":
            raise _out_of_order(f"{where}.tool_calls", "only an assistant message can call tools")
        open_calls = [call.id for call in message.tool_calls or ()]
        if len(set(open_calls)) < len(open_calls):
            raise _out_of_order(f"{where}.tool_calls", "two calls have the same id")
    if open_calls:
        raise _out_of_order("messages", f"{len(open_calls)} tool calls at the end have no tool message")


def _out_of_order(param: str, message: str) -> ApiError:
    return ApiError(400, f"{param}: {message}", param=param, code="invalid_value")
