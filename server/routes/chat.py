"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from engine.engine import Engine
from engine.text.slices import Slices
from engine.text.tokenizer import Tokenizer
from server.answers import PublicReason, identity, public_reason, respond
from server.body import parse_request, read_body
from server.chat import Piece, Prompt, new_answer_id, pieces, render_prompt
from server.choices import submit_all
from server.daemon import Daemon
from server.leaving import unless_client_leaves
from server.logprobs import chat_logprobs
from server.openapi import documented
from server.schema.chat import (
    AnswerMessage,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    Choice,
    ChunkChoice,
    ChunkDelta,
)

router = APIRouter(tags=["OpenAI"])


@router.post("/v1/chat/completions", **documented(ChatCompletionRequest, ChatCompletion, ChatCompletionChunk))
async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation, whole or streamed."""
    daemon: Daemon = request.app.state.daemon
    engine = daemon.engine
    wanted = await read_body(request, partial(parse_request, ChatCompletionRequest))
    daemon.check_model(wanted.model)
    sampling = daemon.sampling_defaults.for_request(wanted)
    prompt = await unless_client_leaves(request, daemon.text_pool.run(_prompt_of(engine, wanted)))
    answer_id = new_answer_id("chatcmpl")
    namespace, client = (
        daemon.isolation.namespace(request.scope, wanted.cache_salt),
        daemon.isolation.client(request.scope),
    )
    generations = await submit_all(
        engine, [prompt], sampling, wanted.choices_per_prompt, answer_id, "messages", namespace, client
    )
    answers = [
        pieces(generation, watch=watch)
        for generation, watch in zip(generations, daemon.watch(request.scope, generations), strict=True)
    ]
    return await respond(request, wanted, answers, _ChatWriter(answer_id, daemon.model_id, engine.tokenizer))


def _prompt_of(engine: Engine, wanted: ChatCompletionRequest) -> Slices[Prompt]:
    messages, tools = wanted.messages_for_template(), wanted.tools_for_template()
    yield False
    return (yield from render_prompt(engine, messages, wanted.template_variables, tools))


class _ChatWriter:
    """Pieces in the shapes of chat completions."""

    def __init__(self, answer_id: str, model_id: str, tokenizer: Tokenizer) -> None:
        self._identity = identity(answer_id, model_id)
        self._tokenizer = tokenizer

    def whole(self, choices: Sequence[Piece], **fields: Any) -> ChatCompletion:
        return ChatCompletion(
            object="chat.completion",
            choices=[self._choice(index, choice) for index, choice in enumerate(choices)],
            **self._identity,
            **fields,
        )

    def opening(self, index: int, **fields: Any) -> Iterator[ChatCompletionChunk]:
        yield self._chunk(index, ChunkDelta(role="assistant", content=""), **fields)

    def deltas(self, index: int, piece: Piece, **fields: Any) -> Iterator[ChatCompletionChunk]:
        deltas = [ChunkDelta(reasoning_content=piece.reasoning)] if piece.reasoning else []
        if piece.content or (piece.logprobs and not deltas):
            deltas.append(ChunkDelta(content=piece.content))
        for place, delta in enumerate(deltas, 1):
            yield self._chunk(index, delta, piece=piece if place == len(deltas) else None, **fields)

    def end(self, index: int, reason: PublicReason, **fields: Any) -> ChatCompletionChunk:
        return self._chunk(index, ChunkDelta(), reason, **fields)

    def envelope(self, **fields: Any) -> ChatCompletionChunk:
        return ChatCompletionChunk(object="chat.completion.chunk", **{"choices": []} | self._identity | fields)

    def _choice(self, index: int, piece: Piece) -> Choice:
        message: dict[str, Any] = {"role": "assistant", "content": piece.content}
        if piece.reasoning:
            message["reasoning_content"] = piece.reasoning
        return Choice(
            index=index,
            message=AnswerMessage(**message),
            logprobs=chat_logprobs(self._tokenizer, piece.logprobs) if piece.logprobs else None,
            finish_reason=public_reason(piece.finish_reason),
        )

    def _chunk(
        self,
        index: int,
        delta: ChunkDelta,
        finish_reason: PublicReason | None = None,
        piece: Piece | None = None,
        **fields: Any,
    ) -> ChatCompletionChunk:
        logprobs = chat_logprobs(self._tokenizer, piece.logprobs) if piece and piece.logprobs else None
        choice = ChunkChoice(index=index, delta=delta, logprobs=logprobs, finish_reason=finish_reason)
        return self.envelope(choices=[choice], **fields)
