"""The OpenAPI page: bodies that routes read themselves, streams, and the errors that every route can answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from server.schema.errors import ErrorBody

_REFERENCES = "#/components/schemas/{model}"

DOOR_ERRORS: dict[int | str, dict[str, Any]] = {
    401: {"model": ErrorBody, "description": "a valid API key is needed"},
    403: {"model": ErrorBody, "description": "a foreign page or name, where no key is asked for"},
}
"""What the boundary answers in the place of any route that is not open to all."""

ERRORS: dict[int | str, dict[str, Any]] = DOOR_ERRORS | {
    404: {"model": ErrorBody, "description": "no such model"},
    503: {"model": ErrorBody, "description": "starting, draining or overloaded"},
}

_REQUEST_ERRORS: dict[int | str, dict[str, Any]] = ERRORS | {
    400: {"model": ErrorBody, "description": "the request is wrong; the error names the field"},
    413: {"model": ErrorBody, "description": "the body is too large"},
    415: {"model": ErrorBody, "description": "the body is not JSON"},
    429: {"model": ErrorBody, "description": "the queue is full"},
    500: {"model": ErrorBody, "description": "the daemon failed"},
}


def documented(
    body: type[BaseModel] | Sequence[type[BaseModel]], answer: type[BaseModel], chunk: type[BaseModel] | None = None
) -> dict[str, Any]:
    """Arguments for a route that reads its own body (one of several, maybe) and answers whole, or as a stream of
    chunks too."""
    ok: dict[str, Any] = {"model": answer, "description": "the answer"}
    if chunk is not None:
        stream = {"schema": {"description": f"server-sent events, each a {chunk.__name__}"}}
        ok["content"] = {"text/event-stream": stream}
    bodies = body if isinstance(body, Sequence) else [body]
    references = [{"$ref": _REFERENCES.format(model=each.__name__)} for each in bodies]
    schema = references[0] if len(references) == 1 else {"anyOf": references}
    return {
        "response_model": None,
        "responses": _REQUEST_ERRORS | {200: ok},
        "openapi_extra": {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}},
    }


def install_openapi(app: FastAPI, *bodies: type[BaseModel]) -> None:
    """Add the schemas of `bodies`, which no route declares as a parameter, to the page."""

    def build() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
            _, definitions = models_json_schema([(body, "validation") for body in bodies], ref_template=_REFERENCES)
            schema.setdefault("components", {}).setdefault("schemas", {}).update(definitions.get("$defs", {}))
            _drop_unused_validation_errors(schema)
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = build  # type: ignore[method-assign]


def _drop_unused_validation_errors(schema: dict[str, Any]) -> None:
    """FastAPI documents its own 422 for every parameter; here each failure has OpenAI's shape."""
    for path in schema["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
    for name in ("HTTPValidationError", "ValidationError"):
        schema["components"]["schemas"].pop(name, None)
