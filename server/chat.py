"""From a conversation to the pieces of its answer; what the HTTP door and the command line share."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cache import Frontier
from engine.engine import Engine, FinishReason, Generation, GenerationRequest, SamplingParams
from engine.errors import ChatTemplateError, RequestError
from engine.text.reasoning import ReasoningSplitter, opens_reasoning
from server.frontiers import marked_places
from server.schema.usage import Cost, cost_of


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered conversation. `opens_reasoning`: the answer begins inside a think block."""

    token_ids: tuple[int, ...]
    opens_reasoning: bool = False
    frontiers: tuple[Frontier, ...] = ()
    """Where it is likely to be resumed."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of an answer; the last one has a `finish_reason` and a `cost`."""

    reasoning: str
    content: str
    finish_reason: FinishReason | None = None
    cost: Cost | None = None


def render_prompt(engine: Engine, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> Prompt:
    """Template, then tokens. Blocking for long prompts. Raises ChatTemplateError."""
    if engine.chat_template is None:
        raise ChatTemplateError("the model has no chat template, so it cannot answer conversations")
    text = engine.chat_template.render(messages, variables=variables)
    places = marked_places(engine.chat_template, text, messages, variables)
    token_ids, counts = engine.tokenizer.encode_with_marks(text, list(places))
    frontiers = [Frontier(count, kind) for count, kind in zip(counts, places.values(), strict=True) if count]
    return Prompt(tuple(token_ids), opens_reasoning(text), tuple(frontiers))


def submit(engine: Engine, prompt: Prompt, sampling: SamplingParams) -> Generation:
    """Queue a prompt. Raises RequestError at once when it cannot be served."""
    try:
        answer_id = f"chatcmpl-{uuid.uuid4().hex}"
        return engine.submit(GenerationRequest(answer_id, prompt.token_ids, sampling, frontiers=prompt.frontiers))
    except RequestError as error:
        if error.param == "prompt":  # the engine's name for what a client sent as messages
            error.param = "messages"
        raise


async def pieces(generation: Generation, *, starts_in_reasoning: bool = False) -> AsyncGenerator[Piece, None]:
    """The answer as it comes, thinking apart; leaving the iteration cancels the request."""
    splitter = ReasoningSplitter(starts_inside=starts_in_reasoning)
    async with generation:
        async for delta in generation:
            reasoning, content = splitter.feed(delta.text)
            if delta.finish_reason is None:
                if reasoning or content:
                    yield Piece(reasoning, content)
                continue
            assert delta.usage is not None
            rest = splitter.finish()
            cost = cost_of(delta.usage, delta.timings, delta.reuse)
            yield Piece(reasoning + rest.reasoning, content + rest.content, delta.finish_reason, cost)
