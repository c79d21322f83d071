"""`GET /v1/models` and `/v1/models/{id}`."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter, Request

from server.daemon import Daemon
from server.errors import ApiError
from server.openapi import ERRORS
from server.responses import JsonResponse
from server.schema.models import ModelCard, ModelList

router = APIRouter(tags=["OpenAI"], responses=ERRORS)

_OWNER: Literal["dalsegno"] = "dalsegno"


@router.get("/v1/models", response_model=ModelList)
async def list_models(request: Request) -> JsonResponse:
    """The served model."""
    return JsonResponse(ModelList(object="list", data=[_card(request.app.state.daemon)]))


@router.get("/v1/models/{model_id:path}", response_model=ModelCard)
async def retrieve_model(request: Request, model_id: str) -> JsonResponse:
    """One model, with the most tokens that prompt and answer may have together."""
    daemon: Daemon = request.app.state.daemon
    if model_id != daemon.model_id:
        message = f"no such model here; {daemon.model_id!r} is served"
        raise ApiError(404, message, param="model", code="model_not_found")
    return JsonResponse(_card(daemon))


def _card(daemon: Daemon) -> ModelCard:
    return ModelCard(
        id=daemon.model_id,
        object="model",
        created=daemon.created_unix,
        owned_by=_OWNER,
        max_model_len=daemon.engine.max_context_tokens,
    )
