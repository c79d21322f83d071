"""`GET /metrics`."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from server.daemon import Daemon
from server.openapi import DOOR_ERRORS

router = APIRouter(tags=["operation"], responses=DOOR_ERRORS)


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "for Prometheus"}},
)
async def metrics(request: Request) -> Response:
    """Counts for Prometheus, as text or OpenMetrics. Needs a key where keys are set."""
    daemon: Daemon = request.app.state.daemon
    content, content_type = daemon.metrics.expose(request.headers.get("accept", ""))
    return Response(content, media_type=None, headers={"content-type": content_type})
