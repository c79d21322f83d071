"""`POST /v1/chat/completions`: what is taken and what is answered."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

from server.schema.messages import ChatMessage, RequestModel
from server.schema.usage import Reuse, TimingsBody, UsageBody

_RESERVED_VARIABLES = frozenset({"messages", "tools", "add_generation_prompt"})


def _check_variables(variables: dict[str, Any] | None) -> dict[str, Any] | None:
    if _RESERVED_VARIABLES & set(variables or ()):
        raise PydanticCustomError("reserved", "messages, tools and add_generation_prompt cannot be set here")
    return variables


class StreamOptions(RequestModel):
    """`include_usage` asks for one more chunk with the usage."""

    include_usage: bool | None = None


class ChatCompletionRequest(RequestModel):
    """A conversation to answer. Fields that are not listed and would change nothing are ignored."""

    model: str | None = Field(None, description="the served model; may be left out")
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = Field(None, description="0 or -1: off")
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    enable_thinking: bool | None = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, AfterValidator(_check_variables)] = Field(
        None, description="variables of the chat template"
    )

    @property
    def wanted_tokens(self) -> int | None:
        """The longest answer that the client wants; the newer name of the field wins."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def template_variables(self) -> dict[str, Any]:
        variables = dict(self.chat_template_kwargs or {})
        if self.enable_thinking is not None:
            variables["enable_thinking"] = self.enable_thinking
        return variables


class AnswerModel(BaseModel):
    """Base of what clients get; fields that were never set are left out of the JSON."""

    model_config = ConfigDict(frozen=True, protected_namespaces=())


class AnswerMessage(AnswerModel):
    """The model's message; `reasoning_content` is there when it thought first."""

    role: Literal["assistant"]
    content: str
    reasoning_content: str | None = None


class Choice(AnswerModel):
    """One answer."""

    index: int
    message: AnswerMessage
    logprobs: None
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
    logprobs: None
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
