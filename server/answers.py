"""From the pieces of one or several answers to an HTTP response, whole or streamed; what the routes share."""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Any, Literal, Protocol

from fastapi import Request
from starlette.responses import Response

from engine.engine import FinishReason, TokenLogprob
from engine.errors import EngineError
from server.chat import Piece
from server.choices import interleaved, total_cost
from server.errors import ApiError, from_engine
from server.leaving import unless_client_leaves
from server.responses import JsonResponse
from server.schema.base import AnswerModel
from server.schema.sampling import SamplingRequest
from server.schema.usage import Cost
from server.sse import DONE, EventStream, event

PublicReason = Literal["stop", "length"]

logger = logging.getLogger("dalsegno.http")


class AnswerWriter(Protocol):
    """One API's shapes. `fields` are those that every chunk may carry: usage, timings, reuse."""

    def whole(self, choices: Sequence[Piece], **fields: Any) -> AnswerModel:
        """The answer; each choice is one piece with everything."""
        ...

    def opening(self, index: int, **fields: Any) -> Iterable[AnswerModel]:
        """Chunks of a choice before its first piece."""
        ...

    def deltas(self, index: int, piece: Piece, **fields: Any) -> Iterable[AnswerModel]:
        """Chunks for what a piece adds; none for a piece that is empty."""
        ...

    def end(self, index: int, reason: PublicReason, **fields: Any) -> AnswerModel:
        """The last chunk of a choice."""
        ...

    def envelope(self, **fields: Any) -> AnswerModel:
        """A chunk without choices."""
        ...


def identity(answer_id: str, model_id: str) -> dict[str, Any]:
    """What every chunk of an answer repeats."""
    return {"id": answer_id, "created": int(time.time()), "model": model_id}


async def respond(
    request: Request, wanted: SamplingRequest, answers: Sequence[AsyncGenerator[Piece, None]], writer: AnswerWriter
) -> Response:
    """Answer `request`; when its client leaves, every answer is cancelled."""
    joined = interleaved(answers)
    if wanted.stream:
        return EventStream(_events(request, wanted, len(answers), joined, writer))
    choices = await unless_client_leaves(request, _gather(len(answers), joined))
    cost = total_cost([_cost(choice) for choice in choices], wanted.choices_per_prompt)
    return JsonResponse(writer.whole(choices, **_cost_fields(cost)))


def public_reason(reason: FinishReason | None) -> PublicReason:
    """As OpenAI names it."""
    return "length" if reason is FinishReason.LENGTH else "stop"


async def _gather(count: int, joined: AsyncGenerator[tuple[int, Piece], None]) -> list[Piece]:
    reasoning: list[list[str]] = [[] for _ in range(count)]
    content: list[list[str]] = [[] for _ in range(count)]
    logprobs: list[list[TokenLogprob]] = [[] for _ in range(count)]
    last: dict[int, Piece] = {}
    async with contextlib.aclosing(joined):
        async for index, piece in joined:
            reasoning[index].append(piece.reasoning)
            content[index].append(piece.content)
            logprobs[index] += piece.logprobs
            last[index] = piece
    return [
        Piece(
            "".join(reasoning[index]),
            "".join(content[index]),
            last[index].finish_reason,
            last[index].cost,
            tuple(logprobs[index]),
        )
        for index in range(count)
    ]


async def _events(
    request: Request,
    wanted: SamplingRequest,
    count: int,
    joined: AsyncGenerator[tuple[int, Piece], None],
    writer: AnswerWriter,
) -> AsyncGenerator[bytes, None]:
    """Deltas, finish reasons, cost, [DONE]; a failure midway is an error event, never a clean end alone."""
    usage: dict[str, Any] = {"usage": None} if wanted.includes_usage else {}
    costs: dict[int, Cost] = {}
    begun: set[int] = set()
    try:
        async for index, piece in joined:
            # Not before: who times the first chunk times the first token.
            opening = () if index in begun else writer.opening(index, **usage)
            begun.add(index)
            for chunk in itertools.chain(opening, writer.deltas(index, piece, **usage)):
                yield event(chunk)
            if piece.cost is None:
                continue
            costs[index] = piece.cost
            total: dict[str, Any] = {}
            if len(costs) == count:
                total = _cost_fields(total_cost([costs[i] for i in range(count)], wanted.choices_per_prompt))
            yield event(writer.end(index, public_reason(piece.finish_reason), **(usage or total)))
            if wanted.includes_usage and total:
                yield event(writer.envelope(**total))
    except EngineError as error:
        request.state.has_failed = True
        yield event(from_engine(error).body())
    except Exception as error:
        request.state.has_failed = True
        logger.error("a stream failed inside the daemon", exc_info=error)
        yield event(ApiError(500, "the daemon failed on this request", code="internal_error").body())
    finally:
        await joined.aclose()
    yield DONE


def _cost(piece: Piece) -> Cost:
    assert piece.cost is not None
    return piece.cost


def _cost_fields(cost: Cost) -> dict[str, Any]:
    return {"usage": cost.usage, "timings": cost.timings, "reuse": cost.reuse}
