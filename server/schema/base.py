"""The bases of what clients send and of what they get."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from annotated_types import GroupedMetadata, MaxLen
from pydantic import BaseModel, ConfigDict, FailFast

MAX_TOKEN_IDS = 2**24
"""Token ids in one list; the limits of the body are below, and know the context."""


@dataclass(frozen=True, slots=True)
class AtMost(GroupedMetadata):
    """The bound that every list of a request has. Validation ends at the first wrong element: without that each gets an
    error of its own, kilobytes of memory for a byte sent."""

    elements: int

    def __iter__(self) -> Iterator[object]:
        yield FailFast()
        yield MaxLen(self.elements)


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


class AnswerModel(BaseModel):
    """Base of what clients get; fields that were never set are left out of the JSON."""

    model_config = ConfigDict(frozen=True, protected_namespaces=())
