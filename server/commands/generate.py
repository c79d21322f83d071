"""`dalsegno generate`: one prompt, one answer."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from server.commands.options import with_settings
from server.configuration import ConfigurationError, Resolved

if TYPE_CHECKING:
    from server.commands.talk import Message, Talker, Wishes


@with_settings("engine", "cache", model="option", asks_daemon=True)
def generate(
    resolved: Resolved,
    prompt: Annotated[str, typer.Argument(help="what to answer; - reads it from standard input")],
    url: Annotated[str | None, typer.Option(help="ask a running daemon instead", metavar="URL")] = None,
    system: Annotated[str | None, typer.Option(help="system prompt")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="longest answer in tokens")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, max=2, help="0 picks the likeliest token")] = None,
    seed: Annotated[int | None, typer.Option(help="the same seed gives the same answer")] = None,
    thinking: Annotated[bool | None, typer.Option(help="let a model that can think do so, or not")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the answer with its cost as JSON, at the end")] = False,
) -> None:
    """Answer one prompt on standard output, as it comes."""
    from server.commands.talk import Wishes, make_talker

    if prompt == "-":
        prompt = sys.stdin.read()
    if not prompt.strip():
        raise ConfigurationError("PROMPT is empty; expected some text")
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": prompt})
    wishes = Wishes(max_tokens, temperature, seed, thinking)
    asyncio.run(_answer(make_talker(resolved, url), messages, wishes, as_json))


async def _answer(talker: Talker, messages: list[Message], wishes: Wishes, as_json: bool) -> None:
    whole: dict[str, object] = {}
    reasoning, content = [], []
    try:
        await talker.open()
        async for piece in talker.answer(messages, wishes):
            reasoning.append(piece.reasoning)
            content.append(piece.content)
            if piece.finish_reason:
                whole["finish_reason"] = piece.finish_reason
            whole |= piece.cost
            if not as_json:
                print(piece.content, end="", flush=True)
    finally:
        await talker.close()
    if as_json:
        print(json.dumps({"content": "".join(content), "reasoning_content": "".join(reasoning), **whole}))
    else:
        print()
