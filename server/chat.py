"""From a conversation to the pieces of its answer; what the HTTP door and the command line share."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from cache import Frontier
from engine.engine import Delta, Engine, FinishReason, Generation, GenerationRequest, SamplingParams, TokenLogprob
from engine.errors import ChatTemplateError, RequestError
from engine.limits import refuse_overlong
from engine.request import Thinking
from engine.text.encoder import Encoded
from engine.text.reasoning import opens_reasoning
from engine.text.slices import Slices
from server.frontiers import marked_places
from server.schema.usage import Cost, cost_of


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text, or a rendered conversation."""

    token_ids: tuple[int, ...]
    thinking: Thinking = Thinking.IS_TEXT
    frontiers: tuple[Frontier, ...] = ()
    """Where it is likely to be resumed."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of an answer; the last one has a `finish_reason` and a `cost`."""

    reasoning: str
    content: str
    finish_reason: FinishReason | None = None
    cost: Cost | None = None
    logprobs: tuple[TokenLogprob, ...] = ()


def render_prompt(
    engine: Engine,
    messages: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any],
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> Slices[Prompt]:
    """Template, then tokens, then where to resume. Raises ChatTemplateError, ContextLengthExceededError."""
    text, encoded = yield from encode_conversation(
        engine, messages, variables, tools, max_tokens=engine.max_context_tokens
    )
    with naming("messages"):
        refuse_overlong(len(encoded.token_ids), engine.max_context_tokens)
    assert engine.chat_template is not None
    places = yield from marked_places(engine.chat_template, text, messages, variables, tools)
    counts = map(encoded.tokens_before, places)
    frontiers = [Frontier(count, kind) for count, kind in zip(counts, places.values(), strict=True) if count]
    thinking = Thinking.IS_OPEN if opens_reasoning(text) else Thinking.MAY_COME
    return Prompt(tuple(encoded.token_ids), thinking, tuple(frontiers))


def encode_conversation(
    engine: Engine,
    messages: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any],
    tools: Sequence[Mapping[str, Any]] | None = None,
    *,
    add_generation_prompt: bool = True,
    add_special_tokens: bool = False,
    max_tokens: int | None = None,
) -> Slices[tuple[str, Encoded]]:
    """What the template wrote, and its tokens; the size is looked at before each step. Raises ChatTemplateError, and
    ContextLengthExceededError as soon as it is sure that there are `max_tokens`."""
    template, encoder = engine.chat_template, engine.chat_encoder
    if template is None or encoder is None:
        raise ChatTemplateError("the model has no chat template, so it cannot answer conversations; send a prompt")
    with naming("messages"):
        encoder.refuse_endless(sum(map(_sure_characters, messages)), engine.max_context_tokens)
        text = yield from template.write(
            messages, tools=tools, variables=variables, add_generation_prompt=add_generation_prompt
        )
        encoder.refuse_endless(len(text), engine.max_context_tokens)
        encoded = yield from encoder.encode(text, add_special_tokens=add_special_tokens, max_tokens=max_tokens)
    return text, encoded


def _sure_characters(message: Mapping[str, Any]) -> int:
    """Characters that any template writes; of an assistant's message it may leave out the thinking."""
    content = message.get("content")
    return len(content.strip()) if isinstance(content, str) and message.get("role") != "assistant" else 0


def submit(
    engine: Engine,
    prompt: Prompt,
    sampling: SamplingParams,
    request_id: str | None = None,
    param: str = "messages",
    namespace: str = "",
    client: str = "",
) -> Generation:
    """Queue a prompt; `param` is the field in which the client sent it. Raises RequestError at once when it cannot be
    served."""
    request_id = request_id or new_answer_id("chatcmpl")
    with naming(param):
        return engine.submit(
            GenerationRequest(
                request_id, prompt.token_ids, sampling, namespace, prompt.frontiers, prompt.thinking, client
            )
        )


@contextmanager
def naming(param: str) -> Iterator[None]:
    """Errors about the prompt name the field in which the client sent it."""
    try:
        yield
    except RequestError as error:
        if error.param == "prompt":
            error.param = param
        raise


def new_answer_id(kind: str) -> str:
    """`kind` is OpenAI's prefix, such as chatcmpl."""
    return f"{kind}-{uuid.uuid4().hex}"


def _watch_nothing(_delta: Delta) -> None:
    pass


async def pieces(
    generation: Generation, *, watch: Callable[[Delta], None] = _watch_nothing
) -> AsyncGenerator[Piece, None]:
    """The answer as it comes; leaving the iteration cancels the request. `watch` sees every delta."""
    async with generation:
        async for delta in generation:
            watch(delta)
            cost = None if delta.usage is None else cost_of(delta.usage, delta.timings, delta.reuse)
            if delta.reasoning or delta.text or delta.logprobs or cost:
                yield Piece(delta.reasoning, delta.text, delta.finish_reason, cost, delta.logprobs)
