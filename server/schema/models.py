"""`GET /v1/models`."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


class ModelCard(BaseModel):
    """A served model. `max_model_len`: most tokens of prompt and answer together."""

    model_config = ConfigDict(frozen=True, protected_namespaces=())

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(BaseModel):
    """The served models."""

    model_config = ConfigDict(frozen=True)

    object: Literal["list"]
    data: list[ModelCard]
