"""`POST /tokenize` and `/detokenize`, as vLLM's."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field, SkipValidation

from server.schema.base import MAX_TOKEN_IDS, AnswerModel, AtMost, RequestModel
from server.schema.chat import Conversation
from server.schema.numbers import all_whole


class TokenizeTextRequest(RequestModel):
    """A text."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool | None = Field(None, description="begin as the tokenizer does; the default")
    return_token_strs: bool | None = None


class TokenizeChatRequest(Conversation):
    """A conversation, through the chat template."""

    model: str | None = None
    add_generation_prompt: bool | None = Field(None, description="open the assistant's turn; the default")
    add_special_tokens: bool | None = Field(None, description="beyond those of the template; off by default")
    return_token_strs: bool | None = None


class TokenizeAnswer(AnswerModel):
    """`max_model_len`: most tokens of prompt and answer together."""

    count: int
    max_model_len: int
    tokens: SkipValidation[list[int]]
    token_strs: SkipValidation[list[str] | None]


class DetokenizeRequest(RequestModel):
    """Tokens."""

    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0, lt=2**32)]], AtMost(MAX_TOKEN_IDS), BeforeValidator(all_whole)]


class DetokenizeAnswer(AnswerModel):
    """Their text, special tokens included."""

    prompt: str
