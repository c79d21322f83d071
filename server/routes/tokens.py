"""`POST /tokenize` and `/detokenize`."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request

from engine.engine import Engine
from engine.errors import ChatTemplateError
from server.body import parse, parse_request, read_json_object
from server.chat import naming
from server.daemon import Daemon
from server.openapi import documented
from server.responses import JsonResponse
from server.schema.tokens import (
    DetokenizeAnswer,
    DetokenizeRequest,
    TokenizeAnswer,
    TokenizeChatRequest,
    TokenizeTextRequest,
)

router = APIRouter(tags=["tokens"])


@router.post("/tokenize", **documented((TokenizeTextRequest, TokenizeChatRequest), TokenizeAnswer))
async def tokenize(request: Request) -> JsonResponse:
    """The tokens of a text, or of a conversation through the chat template."""
    daemon: Daemon = request.app.state.daemon
    engine = daemon.engine
    body = await read_json_object(request)
    schema: type[TokenizeTextRequest | TokenizeChatRequest]
    schema = TokenizeChatRequest if "messages" in body else TokenizeTextRequest
    wanted = parse_request(schema, body)
    daemon.check_model(wanted.model)
    token_ids = await asyncio.to_thread(_encode, engine, wanted)
    strings = None
    if wanted.return_token_strs:
        strings = [engine.tokenizer.token_of(token_id) or "" for token_id in token_ids]
    return JsonResponse(
        TokenizeAnswer(
            count=len(token_ids), max_model_len=engine.max_context_tokens, tokens=token_ids, token_strs=strings
        )
    )


@router.post("/detokenize", **documented(DetokenizeRequest, DetokenizeAnswer))
async def detokenize(request: Request) -> JsonResponse:
    """The text of tokens, special ones included."""
    daemon: Daemon = request.app.state.daemon
    tokenizer = daemon.engine.tokenizer
    wanted = parse(DetokenizeRequest, await read_json_object(request))
    daemon.check_model(wanted.model)
    text = await asyncio.to_thread(tokenizer.decode, wanted.tokens, skip_special_tokens=False)
    return JsonResponse(DetokenizeAnswer(prompt=text))


def _encode(engine: Engine, wanted: TokenizeTextRequest | TokenizeChatRequest) -> list[int]:
    if isinstance(wanted, TokenizeTextRequest):
        return engine.tokenizer.encode(wanted.prompt, add_special_tokens=wanted.add_special_tokens is not False)
    if engine.chat_template is None:
        raise ChatTemplateError("the model has no chat template, so a conversation has no tokens; send a prompt")
    text = engine.chat_template.render(
        wanted.messages_for_template(),
        tools=wanted.tools_for_template(),
        add_generation_prompt=wanted.add_generation_prompt is not False,
        variables=wanted.template_variables,
    )
    with naming("messages"):
        return engine.tokenizer.encode(text, add_special_tokens=bool(wanted.add_special_tokens))
