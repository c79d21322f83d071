"""`POST /v1/chat/completions`: what is taken and what is answered."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from server.schema.base import AnswerModel, AtMost, RequestModel
from server.schema.logprobs import ChatLogprobs
from server.schema.messages import ChatMessage, Tool
from server.schema.numbers import Integer, TokenLimit
from server.schema.sampling import MAX_TOP_LOGPROBS, SamplingRequest
from server.schema.usage import Reuse, TimingsBody, UsageBody
from server.settings import MAX_MESSAGES

MAX_TOOLS = 1024

_Word = Annotated[str, Field(max_length=64)]
_RESERVED_VARIABLES = frozenset({"messages", "tools", "add_generation_prompt"})


def _check_variables(variables: dict[str, Any] | None) -> dict[str, Any] | None:
    if _RESERVED_VARIABLES & set(variables or ()):
        raise PydanticCustomError("reserved", "messages, tools and add_generation_prompt cannot be set here")
    return variables


class Conversation(RequestModel):
    """Messages, tools and what else a chat template is told."""

    messages: Annotated[list[ChatMessage], Field(min_length=1), AtMost(MAX_MESSAGES)]
    tools: Annotated[list[Tool], AtMost(MAX_TOOLS)] | None = None
    tool_choice: Any = Field(None, description="none keeps the tools from the model; more than auto is not built yet")
    enable_thinking: bool | None = None
    reasoning_effort: _Word | None = Field(
        None, description="none switches thinking off; any other value is a variable of the chat template"
    )
    verbosity: _Word | None = Field(None, description="a variable of the chat template")
    chat_template_kwargs: Annotated[dict[str, Any] | None, AfterValidator(_check_variables)] = Field(
        None, description="variables of the chat template"
    )

    def messages_for_template(self) -> list[dict[str, Any]]:
        return [message.for_template() for message in self.messages]

    def tools_for_template(self) -> list[dict[str, Any]] | None:
        if not self.tools or self.tool_choice == "none":
            return None
        return [tool.model_dump(exclude_unset=True) for tool in self.tools]

    @property
    def template_variables(self) -> dict[str, Any]:
        variables = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort == "none":
            variables.setdefault("enable_thinking", False)
        elif self.reasoning_effort is not None:
            variables["reasoning_effort"] = self.reasoning_effort
        if self.verbosity is not None:
            variables["verbosity"] = self.verbosity
        if self.enable_thinking is not None:
            variables["enable_thinking"] = self.enable_thinking
        return variables


class ChatCompletionRequest(Conversation, SamplingRequest):
    """A conversation to answer. Fields that are not listed and would change nothing are ignored."""

    max_completion_tokens: TokenLimit | None = Field(None, description="the newer name of max_tokens; it wins")
    logprobs: bool | None = None
    top_logprobs: Annotated[Integer, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = Field(
        None, description="needs logprobs"
    )

    @model_validator(mode="after")
    def _check_top_logprobs(self) -> ChatCompletionRequest:
        if self.top_logprobs and not self.logprobs:
            raise PydanticCustomError("logprobs_missing", "top_logprobs needs logprobs to be true")
        return self

    @property
    def wanted_tokens(self) -> int | None:
        """The newer name of the field wins."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def wanted_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class AnswerMessage(AnswerModel):
    """The model's message; `reasoning_content` is there when it thought first."""

    role: Literal["assistant"]
    content: str
    reasoning_content: str | None = None


class Choice(AnswerModel):
    """One answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"]


class ChatCompletion(AnswerModel):
    """The whole answer."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[Choice]
    usage: UsageBody
    timings: TimingsBody
    reuse: Reuse


class ChunkDelta(AnswerModel):
    """What a chunk adds."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None


class ChunkChoice(AnswerModel):
    """A piece of one answer; the last one has a `finish_reason`."""

    index: int
    delta: ChunkDelta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"] | None


class ChatCompletionChunk(AnswerModel):
    """One event of a streamed answer; the last one carries usage, timings and reuse."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: UsageBody | None = None
    timings: TimingsBody | None = None
    reuse: Reuse | None = None
