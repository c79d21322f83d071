"""`GET /health`, `/livez`, `/readyz`, and what other servers' clients ask for: `/ping`, `/version`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request

from server.daemon import Daemon
from server.responses import JsonResponse
from server.schema.errors import ErrorBody
from server.schema.health import HealthBody, Probe, VersionBody
from server.version import package_version

router = APIRouter(tags=["health"])

_UNHEALTHY: dict[int | str, dict[str, Any]] = {503: {"model": HealthBody, "description": "not serving"}}
_UNREADY: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorBody, "description": "an unknown kind of strictness"},
    503: {"model": Probe, "description": "not serving, or not as strictly as was asked for"},
}


@router.get("/health", response_model=HealthBody, responses=_UNHEALTHY)
async def health(request: Request) -> JsonResponse:
    """Whether the engine loop turned within the last seconds, and whether anything is amiss with what it does."""
    daemon: Daemon = request.app.state.daemon
    found = daemon.health()
    body = HealthBody.model_validate(
        {
            "status": found.status,
            "reasons": list(found.reasons),
            "reuse": found.reuse,
            "faults": list(found.faults),
            "drained": found.is_drained,
        }
    )
    return JsonResponse(body, status_code=200 if found.is_ready else 503)


@router.get("/livez", response_model=Probe)
async def livez() -> JsonResponse:
    """Whether the process answers at all; a restart would help if not."""
    return JsonResponse(Probe(status="ok"))


@router.get("/readyz", response_model=Probe, responses=_UNREADY)
async def readyz(
    request: Request,
    strict: Annotated[
        Literal["reuse"] | None, Query(description="reuse: answer 503 as well while reuse is degraded or collapsed")
    ] = None,
) -> JsonResponse:
    """Whether to send requests here."""
    daemon: Daemon = request.app.state.daemon
    found = daemon.health()
    is_ready = found.is_ready and (strict is None or found.reuses)
    return JsonResponse(Probe(status=found.status.value), status_code=200 if is_ready else 503)


@router.post("/ping", include_in_schema=False)
@router.get("/ping", response_model=Probe, responses={503: {"model": Probe, "description": "not serving"}})
async def ping(request: Request) -> JsonResponse:
    """Whether to send requests here, by the name that SageMaker and vLLM give the question."""
    return await readyz(request, None)


@router.get("/version", response_model=VersionBody)
async def version() -> JsonResponse:
    """The version of this program, as vLLM tells its own."""
    return JsonResponse(VersionBody(version=package_version()))
