"""`POST /tokenize` and `/detokenize`."""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from engine.engine import Engine
from engine.errors import RequestError
from engine.text.slices import Slices
from engine.text.tokenizer import Tokenizer
from server.body import parse, parse_request, read_body
from server.chat import encode_conversation
from server.daemon import Daemon
from server.leaving import unless_client_leaves
from server.openapi import documented
from server.responses import JsonResponse, to_json
from server.schema.base import AnswerModel
from server.schema.tokens import (
    DetokenizeAnswer,
    DetokenizeRequest,
    TokenizeAnswer,
    TokenizeChatRequest,
    TokenizeTextRequest,
)

router = APIRouter(tags=["tokens"])


@router.post("/tokenize", **documented((TokenizeTextRequest, TokenizeChatRequest), TokenizeAnswer))
async def tokenize(request: Request) -> Response:
    """The tokens of a text, or of a conversation through the chat template."""
    daemon: Daemon = request.app.state.daemon
    engine = daemon.engine
    wanted = await read_body(request, _wanted)
    daemon.check_model(wanted.model)
    return await _answer(request, _tokenized(engine, wanted))


@router.post("/detokenize", **documented(DetokenizeRequest, DetokenizeAnswer))
async def detokenize(request: Request) -> Response:
    """The text of tokens, special ones included."""
    daemon: Daemon = request.app.state.daemon
    tokenizer = daemon.engine.tokenizer
    wanted = await read_body(request, partial(parse, DetokenizeRequest))
    daemon.check_model(wanted.model)
    return await _answer(request, _detokenized(tokenizer, wanted.tokens))


async def _answer(request: Request, work: Slices[AnswerModel]) -> Response:
    """Written where it was worked on: hundreds of thousands of tokens would keep the event loop."""
    daemon: Daemon = request.app.state.daemon
    written = await unless_client_leaves(request, daemon.text_pool.run(_written(work)))
    return Response(written, media_type=JsonResponse.media_type)


def _written(work: Slices[AnswerModel]) -> Slices[bytes]:
    answer = yield from work
    yield False
    # Its fields as they are: pydantic would copy the tokens one by one, and other threads wait for that.
    return to_json(vars(answer))


def _wanted(body: dict[str, Any]) -> TokenizeTextRequest | TokenizeChatRequest:
    if "messages" in body:
        return parse_request(TokenizeChatRequest, body)
    return parse_request(TokenizeTextRequest, body)


def _tokenized(engine: Engine, wanted: TokenizeTextRequest | TokenizeChatRequest) -> Slices[AnswerModel]:
    token_ids = yield from _encode(engine, wanted)
    strings = None
    if wanted.return_token_strs:
        yield False
        strings = [engine.tokenizer.token_of(token_id) or "" for token_id in token_ids]
    return TokenizeAnswer(
        count=len(token_ids), max_model_len=engine.max_context_tokens, tokens=token_ids, token_strs=strings
    )


def _encode(engine: Engine, wanted: TokenizeTextRequest | TokenizeChatRequest) -> Slices[list[int]]:
    """Also of a text that the context does not hold, so that a client can tell by how much."""
    if isinstance(wanted, TokenizeTextRequest):
        engine.tokenizer.text_encoder.refuse_endless(len(wanted.prompt), engine.max_context_tokens)
        encoded = yield from engine.tokenizer.text_encoder.encode(
            wanted.prompt, add_special_tokens=wanted.add_special_tokens is not False
        )
        return encoded.token_ids
    _, encoded = yield from encode_conversation(
        engine,
        wanted.messages_for_template(),
        wanted.template_variables,
        wanted.tools_for_template(),
        add_generation_prompt=wanted.add_generation_prompt is not False,
        add_special_tokens=bool(wanted.add_special_tokens),
    )
    return encoded.token_ids


def _detokenized(tokenizer: Tokenizer, token_ids: list[int]) -> Slices[AnswerModel]:
    """Raises RequestError for an id that is no token's: the text would lack it in silence."""
    yield False
    for place, token_id in enumerate(token_ids):
        if tokenizer.token_of(token_id) is None:
            raise RequestError(f"tokens[{place}] is {token_id}, which is the id of no token", param=f"tokens[{place}]")
    return DetokenizeAnswer(prompt=tokenizer.decode(token_ids, skip_special_tokens=False))
