"""OpenAI's error shape."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class ErrorDetail(BaseModel):
    """What went wrong; `param` names the field, `code` the kind."""

    model_config = ConfigDict(frozen=True)

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """Every failure."""

    model_config = ConfigDict(frozen=True)

    error: ErrorDetail
