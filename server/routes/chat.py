"""`POST /v1/chat/completions`."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, Literal

from fastapi import APIRouter, Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from engine.engine import FinishReason
from engine.errors import EngineError
from server.body import parse, read_json_object
from server.chat import Piece, pieces, render_prompt, submit
from server.daemon import Daemon
from server.errors import ApiError, from_engine
from server.openapi import documented
from server.responses import JsonResponse
from server.schema.chat import (
    AnswerMessage,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    Choice,
    ChunkChoice,
    ChunkDelta,
)
from server.schema.unsupported import refuse_unsupported
from server.schema.usage import Cost
from server.sse import DONE, EventStream, event, until_disconnect

router = APIRouter(tags=["OpenAI"])

logger = logging.getLogger("dalsegno.http")


@router.post("/v1/chat/completions", **documented(ChatCompletionRequest, ChatCompletion, ChatCompletionChunk))
async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation, whole or streamed."""
    daemon: Daemon = request.app.state.daemon
    engine = daemon.engine
    body = await read_json_object(request)
    refuse_unsupported(body)
    wanted = parse(ChatCompletionRequest, body)
    check_model(daemon, wanted.model)
    messages = [message.for_template() for message in wanted.messages]
    prompt = await asyncio.to_thread(render_prompt, engine, messages, wanted.template_variables)
    generation = submit(engine, prompt, daemon.sampling_defaults.for_request(wanted))
    answer = pieces(generation, starts_in_reasoning=prompt.opens_reasoning)
    writer = _AnswerWriter(generation.request_id, daemon.model_id)
    if wanted.stream:
        return EventStream(writer.events(answer, includes_usage=wanted.includes_usage))
    return JsonResponse(await _unless_client_leaves(request, writer.whole(answer)))


def check_model(daemon: Daemon, model: str | None) -> None:
    """Raises ApiError (404) unless `model` is the served one, or left out."""
    if model is not None and model != daemon.model_id:
        raise ApiError(404, f"no such model here; {daemon.model_id!r} is served", param="model", code="model_not_found")


class _AnswerWriter:
    """Puts the pieces of one answer into OpenAI's shapes."""

    def __init__(self, answer_id: str, model_id: str) -> None:
        self._id = answer_id
        self._model = model_id
        self._created = int(time.time())

    async def whole(self, answer: AsyncIterator[Piece]) -> ChatCompletion:
        """Wait for the end."""
        reasoning, content = [], []
        last: Piece | None = None
        async for last in answer:
            reasoning.append(last.reasoning)
            content.append(last.content)
        assert last is not None
        assert last.cost is not None
        message: dict[str, Any] = {"role": "assistant", "content": "".join(content)}
        if any(reasoning):
            message["reasoning_content"] = "".join(reasoning)
        return ChatCompletion(
            id=self._id,
            object="chat.completion",
            created=self._created,
            model=self._model,
            choices=[
                Choice(
                    index=0,
                    message=AnswerMessage(**message),
                    logprobs=None,
                    finish_reason=_public_reason(last.finish_reason),
                )
            ],
            usage=last.cost.usage,
            timings=last.cost.timings,
            reuse=last.cost.reuse,
        )

    async def events(self, answer: AsyncGenerator[Piece, None], *, includes_usage: bool) -> AsyncGenerator[bytes, None]:
        """Role, deltas, finish reason, cost, [DONE]; a failure midway is an error event, never a clean end alone."""
        usage: dict[str, Any] = {"usage": None} if includes_usage else {}
        try:
            yield event(self._chunk(ChunkDelta(role="assistant", content=""), **usage))
            async for piece in answer:
                for delta in _deltas(piece):
                    yield event(self._chunk(delta, **usage))
                if piece.cost is None:
                    continue
                cost = _cost_fields(piece.cost)
                reason = _public_reason(piece.finish_reason)
                yield event(self._chunk(ChunkDelta(), reason, **(usage if includes_usage else cost)))
                if includes_usage:
                    yield event(self._envelope(choices=[], **cost))
        except EngineError as error:
            yield event(from_engine(error).body())
        except Exception as error:
            logger.error("a stream failed inside the daemon", exc_info=error)
            yield event(ApiError(500, "the daemon failed on this request", code="internal_error").body())
        finally:
            await answer.aclose()
        yield DONE

    def _chunk(
        self, delta: ChunkDelta, finish_reason: Literal["stop", "length"] | None = None, **fields: Any
    ) -> ChatCompletionChunk:
        choice = ChunkChoice(index=0, delta=delta, logprobs=None, finish_reason=finish_reason)
        return self._envelope(choices=[choice], **fields)

    def _envelope(self, **fields: Any) -> ChatCompletionChunk:
        return ChatCompletionChunk(
            id=self._id, object="chat.completion.chunk", created=self._created, model=self._model, **fields
        )


def _deltas(piece: Piece) -> list[ChunkDelta]:
    deltas = [ChunkDelta(reasoning_content=piece.reasoning)] if piece.reasoning else []
    if piece.content:
        deltas.append(ChunkDelta(content=piece.content))
    return deltas


def _cost_fields(cost: Cost) -> dict[str, Any]:
    return {"usage": cost.usage, "timings": cost.timings, "reuse": cost.reuse}


def _public_reason(reason: FinishReason | None) -> Literal["stop", "length"]:
    return "length" if reason is FinishReason.LENGTH else "stop"


async def _unless_client_leaves(request: Request, answer: Any) -> ChatCompletion:
    """Wait for the answer and for the client's leaving at once; the latter cancels the former."""
    work = asyncio.ensure_future(answer)
    leave = asyncio.ensure_future(until_disconnect(request.receive))
    try:
        await asyncio.wait({work, leave}, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            result: ChatCompletion = work.result()
            return result
        raise ClientDisconnect
    finally:
        for task in (work, leave):
            task.cancel()
        await asyncio.gather(work, leave, return_exceptions=True)
