"""JSON answers, written by orjson."""

from __future__ import annotations

from typing import Any

import orjson
from pydantic import BaseModel
from starlette.responses import Response


def to_json(content: Any) -> bytes:
    """Plain data or a pydantic record (fields that were never set are left out) -> JSON."""
    if isinstance(content, BaseModel):
        content = content.model_dump(mode="json", exclude_unset=True)
    return orjson.dumps(content)


class JsonResponse(Response):
    """A response whose body is plain data or a pydantic record."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return to_json(content)
