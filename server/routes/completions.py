"""`POST /v1/completions`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from engine.engine import Engine
from engine.limits import refuse_overlong
from engine.text.slices import Slices
from engine.text.tokenizer import Tokenizer
from server.answers import PublicReason, identity, public_reason, respond
from server.body import parse_request, read_body
from server.chat import Piece, Prompt, new_answer_id, pieces
from server.choices import submit_all
from server.daemon import Daemon
from server.leaving import unless_client_leaves
from server.logprobs import completion_logprobs
from server.openapi import documented
from server.schema.completion import Completion, CompletionChoice, CompletionChunk, CompletionRequest

router = APIRouter(tags=["OpenAI"])


@router.post("/v1/completions", **documented(CompletionRequest, Completion, CompletionChunk))
async def create_completion(request: Request) -> Response:
    """Go on with a text, or with several, whole or streamed."""
    daemon: Daemon = request.app.state.daemon
    engine = daemon.engine
    wanted = await read_body(request, partial(parse_request, CompletionRequest))
    daemon.check_model(wanted.model)
    sampling = daemon.sampling_defaults.for_request(wanted)
    choices = wanted.choices_per_prompt
    work = _read_prompts(engine, wanted)
    prompts, echoes = await unless_client_leaves(request, daemon.text_pool.run(work))
    answer_id = new_answer_id("cmpl")
    namespace, client = (
        daemon.isolation.namespace(request.scope, wanted.cache_salt),
        daemon.isolation.client(request.scope),
    )
    generations = await submit_all(engine, prompts, sampling, choices, answer_id, "prompt", namespace, client)
    watches = daemon.watch(request.scope, generations)
    answers = [pieces(generation, watch=watch) for generation, watch in zip(generations, watches, strict=True)]
    echoes = [echo for echo in echoes for _ in range(choices)]
    return await respond(
        request, wanted, answers, _CompletionWriter(answer_id, daemon.model_id, engine.tokenizer, echoes)
    )


def _read_prompts(engine: Engine, wanted: CompletionRequest) -> Slices[tuple[list[Prompt], list[str]]]:
    """The prompts as tokens, and what to begin their texts with."""
    tokenizer = engine.tokenizer
    prompts, echoes = [], []
    for prompt in wanted.prompts:
        if isinstance(prompt, str):
            tokenizer.text_encoder.refuse_endless(len(prompt), engine.max_context_tokens)
            encoded = yield from tokenizer.text_encoder.encode(
                prompt,
                add_special_tokens=wanted.add_special_tokens is not False,
                max_tokens=engine.max_context_tokens,
            )
            token_ids = encoded.token_ids
        else:
            token_ids = prompt
        refuse_overlong(len(token_ids), engine.max_context_tokens)
        prompts.append(Prompt(tuple(token_ids)))
        if not wanted.echo:
            echoes.append("")
        else:
            echoes.append(prompt if isinstance(prompt, str) else tokenizer.decode(prompt))
        yield False
    return prompts, echoes


class _CompletionWriter:
    """Pieces in the shapes of text completions. Mutable: counts the characters of each streamed choice."""

    def __init__(self, answer_id: str, model_id: str, tokenizer: Tokenizer, echoes: Sequence[str]) -> None:
        self._identity = identity(answer_id, model_id)
        self._tokenizer = tokenizer
        self._echoes = echoes
        self._offsets = [0] * len(echoes)

    def whole(self, choices: Sequence[Piece], **fields: Any) -> Completion:
        return Completion(
            object="text_completion",
            choices=[
                self._choice(index, choice, self._echoes[index] + choice.content, public_reason(choice.finish_reason))
                for index, choice in enumerate(choices)
            ],
            **self._identity,
            **fields,
        )

    def opening(self, index: int, **fields: Any) -> Iterator[CompletionChunk]:
        if self._echoes[index]:
            choice = CompletionChoice(index=index, text=self._echoes[index], logprobs=None, finish_reason=None)
            yield self.envelope(choices=[choice], **fields)

    def deltas(self, index: int, piece: Piece, **fields: Any) -> Iterator[CompletionChunk]:
        if piece.content or piece.logprobs:
            yield self.envelope(choices=[self._choice(index, piece, piece.content, None)], **fields)

    def end(self, index: int, reason: PublicReason, **fields: Any) -> CompletionChunk:
        choice = CompletionChoice(index=index, text="", logprobs=None, finish_reason=reason)
        return self.envelope(choices=[choice], **fields)

    def envelope(self, **fields: Any) -> CompletionChunk:
        return CompletionChunk(object="text_completion", **{"choices": []} | self._identity | fields)

    def _choice(self, index: int, piece: Piece, text: str, reason: PublicReason | None) -> CompletionChoice:
        logprobs = None
        if piece.logprobs:
            logprobs = completion_logprobs(self._tokenizer, piece.logprobs, self._offsets[index])
            self._offsets[index] += sum(map(len, logprobs.tokens))
        return CompletionChoice(index=index, text=text, logprobs=logprobs, finish_reason=reason)
