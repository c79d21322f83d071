"""The bases of what clients send and of what they get."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


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
