"""Integers as clients write them: 16.0 is one, for JSON has no other number."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from server.schema.base import MAX_TOKEN_IDS, AtMost

NO_LIMIT_TOKENS = 2**31 - 1
"""More than any context holds."""


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def all_whole(values: Any) -> Any:
    """A list whose integers may be written as floats; quick for one that has none."""
    if isinstance(values, list) and float in set(map(type, values)):
        return [_whole(value) for value in values]
    return values


def _limit(tokens: int) -> int:
    if tokens == 0 or tokens < -1:
        raise PydanticCustomError("token_limit", "Input should be 1 or more, or -1 for no limit")
    return NO_LIMIT_TOKENS if tokens == -1 else tokens


Integer = Annotated[int, BeforeValidator(_whole)]
TokenLimit = Annotated[
    Integer,
    AfterValidator(_limit),
    WithJsonSchema({"type": "integer", "minimum": -1, "not": {"const": 0}}),
]
"""The longest answer; -1: as long as the context allows."""
TokenId = Annotated[int, Field(ge=0)]
TokenIds = Annotated[list[TokenId], AtMost(MAX_TOKEN_IDS), BeforeValidator(all_whole)]
