"""`POST /v1/completions`: what is taken and what is answered."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from server.schema.base import AnswerModel, AtMost
from server.schema.logprobs import CompletionLogprobs
from server.schema.numbers import Integer, TokenIds
from server.schema.sampling import MAX_TOP_LOGPROBS, SamplingRequest
from server.schema.usage import Reuse, TimingsBody, UsageBody

MAX_PROMPTS = 128

_TokenIds = Annotated[TokenIds, Field(min_length=1)]


def _prompt_kind(prompt: Any) -> str | None:
    if isinstance(prompt, str):
        return "text"
    if not isinstance(prompt, list) or not prompt:
        return None
    first = prompt[0]
    if isinstance(first, int | float) and not isinstance(first, bool):
        return "tokens"
    if isinstance(first, list):
        return "token_lists"
    return "texts" if isinstance(first, str) else None


PromptField = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[list[str], AtMost(MAX_PROMPTS), Tag("texts")]
    | Annotated[_TokenIds, Tag("tokens")]
    | Annotated[list[_TokenIds], AtMost(MAX_PROMPTS), Tag("token_lists")],
    Discriminator(
        _prompt_kind,
        custom_error_type="prompt_type",
        custom_error_message="Input should be a string, token ids, or a list of either that is not empty",
    ),
]


class CompletionRequest(SamplingRequest):
    """Texts, or tokens, to go on with."""

    prompt: PromptField
    echo: bool | None = Field(None, description="begin each text with its prompt")
    logprobs: Annotated[Integer, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = Field(
        None, description="report this many of the likeliest tokens at each place"
    )
    add_special_tokens: bool | None = Field(None, description="begin a text as the tokenizer does; the default")

    @model_validator(mode="after")
    def _check_echo(self) -> CompletionRequest:
        if self.echo and self.logprobs is not None:
            raise PydanticCustomError("echo", "echo cannot be combined with logprobs: a prompt's are not computed")
        return self

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """Each prompt by itself."""
        prompt: Any = self.prompt
        return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt

    @property
    def wanted_logprobs(self) -> int | None:
        return self.logprobs


class CompletionChoice(AnswerModel):
    """One text, or a piece of one; the last piece has a `finish_reason`."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None


class Completion(AnswerModel):
    """The whole answer. Choices are ordered by prompt: the n answers to the first, then those to the second."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageBody
    timings: TimingsBody
    reuse: Reuse


class CompletionChunk(AnswerModel):
    """One event of a streamed answer; the last one carries usage, timings and reuse."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageBody | None = None
    timings: TimingsBody | None = None
    reuse: Reuse | None = None
