"""What chat and text completions have in common: how tokens are picked, when to stop, and how to answer."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from server.schema.base import AtMost, RequestModel
from server.schema.numbers import Integer, TokenId, TokenLimit, all_whole

MAX_CHOICES = 128
MAX_STOP_STRINGS = 64
MAX_STOP_TOKENS = 128
MAX_STOP_CHARACTERS = 1000
MAX_BIASES = 4096
MAX_TOP_LOGPROBS = 20
MAX_SALT_CHARACTERS = 512

_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,8}")


def _as_list(stop: Any) -> Any:
    if isinstance(stop, str):
        return [stop] if stop else None
    return stop


def _check_bias_size(bias: Any) -> Any:
    if isinstance(bias, dict) and len(bias) > MAX_BIASES:
        raise PydanticCustomError("too_many", "at most {limit} tokens can have a bias", {"limit": MAX_BIASES})
    return bias


def _check_bias(bias: dict[str, float] | None) -> dict[str, float] | None:
    if not all(_TOKEN_ID.fullmatch(token_id) for token_id in bias or ()):
        raise PydanticCustomError("token_id", "every key must be a token id, such as '50256'")
    if not all(-100 <= value <= 100 for value in (bias or {}).values()):
        raise PydanticCustomError("bias", "every bias must be a number from -100 to 100")
    return bias


_StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
StopStrings = Annotated[
    Annotated[list[_StopString], AtMost(MAX_STOP_STRINGS)] | None,
    BeforeValidator(_as_list),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "maxLength": MAX_STOP_CHARACTERS},
                {
                    "type": "array",
                    "items": {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARACTERS},
                    "maxItems": MAX_STOP_STRINGS,
                },
                {"type": "null"},
            ]
        }
    ),
]
LogitBias = Annotated[
    dict[str, float] | None,
    BeforeValidator(_check_bias_size),
    AfterValidator(_check_bias),
    WithJsonSchema(
        {
            "anyOf": [
                {
                    "type": "object",
                    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
                    "propertyNames": {"pattern": f"^({_TOKEN_ID.pattern})$"},
                    "maxProperties": MAX_BIASES,
                },
                {"type": "null"},
            ]
        }
    ),
]


class StreamOptions(RequestModel):
    """`include_usage` asks for one more chunk with the usage."""

    include_usage: bool | None = None


class SamplingRequest(RequestModel):
    """Fields that are not listed and would change nothing are ignored."""

    model: str | None = Field(None, description="the served model; may be left out")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[Integer, Field(ge=1, le=MAX_CHOICES)] | None = Field(None, description="answers to each prompt")
    max_tokens: TokenLimit | None = Field(None, description="-1: as many as the context holds")
    min_tokens: Annotated[Integer, Field(ge=0)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[Integer, Field(ge=-1, lt=2**31)] | None = Field(None, description="0 or -1: off")
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10)] | None = None
    logit_bias: LogitBias = None
    seed: Annotated[Integer, Field(ge=-(2**63), lt=2**63)] | None = Field(None, description="-1: none")
    stop: StopStrings = None
    stop_token_ids: Annotated[list[TokenId], AtMost(MAX_STOP_TOKENS), BeforeValidator(all_whole)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT_CHARACTERS)] | None = Field(
        None, description="what is remembered of the prompt is shared with requests of the same salt only"
    )

    @property
    def choices_per_prompt(self) -> int:
        return self.n or 1

    @property
    def wanted_tokens(self) -> int | None:
        """The longest answer that the client wants."""
        return self.max_tokens

    @property
    def wanted_logprobs(self) -> int | None:
        """How many of the likeliest tokens to report; None reports no log probabilities."""
        return None

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)
