"""`/admin/requests`, `/admin/history`, `/admin/server`: what the last requests cost, the last hour, and who serves."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter, Query, Request

from engine.events import RequestEnded
from ops.event_json import plain
from ops.explanation import explain
from ops.requests import KEPT_REQUESTS, AnswerRecord, RequestRecord
from ops.translation import result_of
from server.daemon import Daemon
from server.errors import ApiError
from server.responses import JsonResponse
from server.routes.admin import ERRORS
from server.schema.errors import ErrorBody
from server.schema.requests import (
    AnswerFailure,
    AnswerRecordBody,
    AnswerResult,
    AnswerTimings,
    HistoryAnswer,
    RequestRecordBody,
    RequestsAnswer,
    ServerAnswer,
)

router = APIRouter(prefix="/admin", tags=["operation"], responses=ERRORS)


@router.get("/requests", response_model=RequestsAnswer, responses={400: {"model": ErrorBody}})
async def list_requests(
    request: Request, limit: Annotated[int, Query(ge=1, le=KEPT_REQUESTS, description="how many at most")] = 50
) -> JsonResponse:
    """The last requests that reached the engine, newest first."""
    daemon: Daemon = request.app.state.daemon
    return JsonResponse(RequestsAnswer(requests=[_record(each) for each in daemon.operations.requests.newest(limit)]))


@router.get("/requests/{name}", response_model=RequestRecordBody, responses={404: {"model": ErrorBody}})
async def show_request(request: Request, name: str) -> JsonResponse:
    """One of the last requests, by its `x-request-id` or the id of its answer: reuse, losses and timings."""
    daemon: Daemon = request.app.state.daemon
    record = daemon.operations.requests.find(name)
    if record is None:
        kept = daemon.operations.requests.capacity
        raise ApiError(404, f"no such request; the last {kept:,} that reached the engine are kept", param="name")
    return JsonResponse(_record(record))


@router.get("/history", response_model=HistoryAnswer, responses={400: {"model": ErrorBody}})
async def show_history(
    request: Request,
    since: Annotated[int, Query(ge=0, description="only what ended after this moment, in unix milliseconds")] = 0,
) -> JsonResponse:
    """Pools, tokens and reuse over the last hour, at the interval of the throughput events."""
    operations = request.app.state.daemon.operations
    points = operations.history.since(since)
    return JsonResponse(
        HistoryAnswer(
            generated_unix_ms=round(time.time() * 1000),
            interval_seconds=operations.interval_seconds,
            points=[{"timestamp_unix_ms": each.timestamp_unix_ms, **plain(each.sample)} for each in points],
        )
    )


@router.get("/server", response_model=ServerAnswer)
async def show_server(request: Request) -> JsonResponse:
    """Which model is served, by what, and since when."""
    operations = request.app.state.daemon.operations
    served = operations.served
    if served is None:
        raise ApiError(503, "the model is being loaded", code="engine_unavailable", headers={"Retry-After": "1"})
    return JsonResponse(
        ServerAnswer(
            version=served.version,
            model=served.model,
            architecture=served.architecture,
            backend=served.backend,
            max_context_tokens=served.max_context_tokens,
            max_concurrency=served.max_concurrency,
            uptime_seconds=operations.uptime_seconds,
        )
    )


def _record(record: RequestRecord) -> RequestRecordBody:
    return RequestRecordBody(
        request_id=record.request_id,
        endpoint=record.endpoint,
        started_unix_ms=record.started_unix_ms,
        outcome=None if record.outcome is None else record.outcome.value,
        answers=[_answer(answer) for answer in record.answers],
    )


def _answer(answer: AnswerRecord) -> AnswerRecordBody:
    ended = answer.ended
    if ended is None:
        return AnswerRecordBody(
            id=answer.answer_id, finish_reason=None, result=None, timings_seconds=None, error=None, explanation=[]
        )
    seconds = asdict(ended.timings)
    error = ended.error
    return AnswerRecordBody(
        id=answer.answer_id,
        finish_reason=ended.finish_reason.value,
        result=_result(ended),
        timings_seconds=AnswerTimings(**{name.removesuffix("_seconds"): value for name, value in seconds.items()}),
        error=None if error is None else AnswerFailure(code=error.code, type=type(error).__name__),
        explanation=explain(ended),
    )


def _result(ended: RequestEnded) -> AnswerResult | None:
    if ended.reuse is None:
        return None
    told = plain(result_of(ended))
    del told["finish_reason"]
    return AnswerResult.model_validate({"computed_prefill_tokens": None, "diverged_at": None, **told})
