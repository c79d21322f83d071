"""Chat messages as a client sends them: text only, so far."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Tag
from pydantic_core import PydanticCustomError

_ROLES = ("system", "developer", "user", "assistant")
_LATER_ROLES = ("tool", "function")
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


class RequestModel(BaseModel):
    """Base of what clients send: exact types, unknown fields ignored, finite numbers only."""

    model_config = ConfigDict(
        extra="ignore",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        hide_input_in_errors=True,
        protected_namespaces=(),
    )


def _check_role(role: Any) -> Any:
    if isinstance(role, str) and role in _LATER_ROLES:
        raise PydanticCustomError("unsupported", "messages of role {role} are not supported yet", {"role": role})
    return role


def _check_part_type(kind: Any) -> Any:
    if isinstance(kind, str) and kind in _LATER_PARTS:
        raise PydanticCustomError("unsupported", "{kind} parts are not supported; send text", {"kind": kind})
    return kind


def _check_tool_calls(calls: Any) -> None:
    if calls:
        raise PydanticCustomError("unsupported", "tool calls are not supported yet")


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


class ChatMessage(RequestModel):
    """One message of a conversation."""

    role: Annotated[Literal["system", "developer", "user", "assistant"], BeforeValidator(_check_role)]
    content: Content
    reasoning_content: str | None = None
    tool_calls: Annotated[None, BeforeValidator(_check_tool_calls)] = None

    def for_template(self) -> dict[str, str]:
        """The message as chat templates expect it: text parts joined, `developer` under its older name `system`."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        message = {"role": "system" if self.role == "developer" else self.role, "content": content}
        if self.reasoning_content is not None and self.role == "assistant":
            message["reasoning_content"] = self.reasoning_content
        return message
