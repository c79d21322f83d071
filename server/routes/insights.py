"""`GET /insights` and `/insights/stream`: what an operator should know, asked for or as it changes."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator

from fastapi import APIRouter, Request
from starlette.responses import Response

from ops.event_json import plain
from server.daemon import Daemon
from server.openapi import DOOR_ERRORS
from server.responses import JsonResponse
from server.schema.insights import InsightsAnswer
from server.sse import EventStream, event

_STREAM = {"text/event-stream": {"schema": {"description": "server-sent events `insights`, each an InsightsAnswer"}}}

router = APIRouter(tags=["operation"], responses=DOOR_ERRORS)


@router.get("/insights", response_model=InsightsAnswer)
async def show_insights(request: Request) -> JsonResponse:
    """What holds at this moment. Needs a key where keys are set."""
    return JsonResponse(_answer(request.app.state.daemon))


@router.get("/insights/stream", response_model=None, responses={200: {"content": _STREAM, "description": "ok"}})
async def stream_insights(request: Request) -> Response:
    """The same at once and after each change, with a comment each 15 s of silence."""
    return EventStream(_changes(request.app.state.daemon))


async def _changes(daemon: Daemon) -> AsyncGenerator[bytes, None]:
    changes = daemon.operations.changes
    while True:
        seen = changes.count
        yield event(_answer(daemon), "insights")
        if daemon.is_over:
            return
        await changes.wait(seen)


def _answer(daemon: Daemon) -> InsightsAnswer:
    health = daemon.health()
    return InsightsAnswer.model_validate(
        {
            "generated_unix_ms": round(time.time() * 1000),
            "status": health.status.value,
            "reuse": health.reuse.value,
            "insights": [plain(each) for each in daemon.operations.active],
        }
    )
