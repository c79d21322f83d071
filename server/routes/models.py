"""`GET /v1/models` and `/v1/models/{id}`."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter, Request

from server.daemon import Daemon
from server.openapi import ERRORS
from server.responses import JsonResponse
from server.schema.models import ModelCard, ModelList

router = APIRouter(tags=["OpenAI"], responses=ERRORS)

_OWNER: Literal["dalsegno"] = "dalsegno"


@router.get("/v1/models", response_model=ModelList)
async def list_models(request: Request) -> JsonResponse:
    """The served model, once for each of its names."""
    daemon: Daemon = request.app.state.daemon
    return JsonResponse(ModelList(object="list", data=[_card(daemon, name) for name in daemon.model_names]))


@router.get("/v1/models/{model_id:path}", response_model=ModelCard)
async def retrieve_model(request: Request, model_id: str) -> JsonResponse:
    """One model, with the most tokens that prompt and answer may have together."""
    daemon: Daemon = request.app.state.daemon
    daemon.check_model(model_id)
    return JsonResponse(_card(daemon, model_id))


def _card(daemon: Daemon, name: str) -> ModelCard:
    return ModelCard(
        id=name,
        object="model",
        created=daemon.created_unix,
        owned_by=_OWNER,
        max_model_len=daemon.engine.max_context_tokens,
    )
