"""`dalsegno chat`: a conversation on the terminal."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from engine.errors import EngineError
from server.commands.options import with_settings
from server.configuration import Resolved

if TYPE_CHECKING:
    from server.commands.talk import Message, Talker, Wishes


@with_settings("engine", "cache", model="argument")
def chat(
    resolved: Resolved,
    url: Annotated[str | None, typer.Option(help="talk to a running daemon instead", metavar="URL")] = None,
    system: Annotated[str | None, typer.Option(help="system prompt")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="longest answer in tokens")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, max=2, help="0 picks the likeliest token")] = None,
    seed: Annotated[int | None, typer.Option(help="the same seed gives the same answer")] = None,
    thinking: Annotated[bool | None, typer.Option(help="let a model that can think do so, or not")] = None,
) -> None:
    """Talk with a model; the history is kept. Ctrl-C stops an answer, Ctrl-D ends the conversation."""
    from server.commands.talk import Wishes, make_talker

    talker = make_talker(resolved, url)
    wishes = Wishes(max_tokens, temperature, seed, thinking)
    history: list[Message] = [{"role": "system", "content": system}] if system else []
    with asyncio.Runner() as runner:
        try:
            runner.run(talker.open())
            _converse(runner, talker, history, wishes)
        finally:
            runner.run(talker.close())


def _converse(runner: asyncio.Runner, talker: Talker, history: list[Message], wishes: Wishes) -> None:
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (gives input() its line editing)
    while True:
        try:
            line = input("you> " if is_terminal else "")
        except (EOFError, KeyboardInterrupt):
            if is_terminal:
                print()
            return
        if not line.strip():
            continue
        if not line.isprintable() and any("\ud800" <= character <= "\udfff" for character in line):
            print("dalsegno: the line is not valid UTF-8; write it again", file=sys.stderr)
            continue
        said = _Said()
        asked: list[Message] = [*history, {"role": "user", "content": line}]
        try:
            runner.run(_print_answer(talker, asked, wishes, said))
        except KeyboardInterrupt:
            print(" (stopped)")
        except EngineError as error:
            print(f"dalsegno: {error}", file=sys.stderr)
            continue
        # A stopped answer stays in the history as far as it came: that is what the user saw.
        history[:] = [*asked, {"role": "assistant", "content": said.content}]


class _Said:
    """What the model has said so far in this turn."""

    content = ""


async def _print_answer(talker: Talker, messages: list[Message], wishes: Wishes, said: _Said) -> None:
    is_thinking = False
    dim, plain = ("\x1b[2m", "\x1b[0m") if sys.stdout.isatty() else ("", "")
    answer = talker.answer(messages, wishes)
    try:
        async for piece in answer:
            if piece.reasoning:
                print(f"{'' if is_thinking else dim}{piece.reasoning}", end="", flush=True)
                is_thinking = True
            if piece.content:
                if is_thinking:
                    print(f"{plain}\n")
                    is_thinking = False
                print(piece.content, end="", flush=True)
                said.content += piece.content
    finally:
        await answer.aclose()
        print(plain if is_thinking else "")
