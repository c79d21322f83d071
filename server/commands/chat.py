"""`dalsegno chat`: a conversation on the terminal."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from server.commands.options import with_settings
from server.configuration import Resolved


@with_settings("engine", "cache", model="argument", asks_daemon=True)
def chat(
    resolved: Resolved,
    url: Annotated[str | None, typer.Option(help="talk to a running daemon instead", metavar="URL")] = None,
    system: Annotated[str, typer.Option(help="system prompt", show_default=False)] = "",
    max_tokens: Annotated[int | None, typer.Option(min=1, help="longest answer in tokens")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, max=2, help="0 picks the likeliest token")] = None,
    seed: Annotated[int | None, typer.Option(help="the same seed gives the same answer")] = None,
    thinking: Annotated[bool | None, typer.Option(help="let a model that can think do so, or not")] = None,
) -> None:
    """Talk with a model; the history is kept. Ctrl-C stops an answer, Ctrl-D ends the conversation, /help tells more.

    After each answer a line says how much of the prompt was reused, and how quickly the answer came.
    """
    from server.commands.consoles import standard_output
    from server.commands.conversation import Conversation
    from server.commands.talk import Wishes, make_talker

    talker = make_talker(resolved, url)
    wishes = Wishes(max_tokens, temperature, seed, thinking)
    with asyncio.Runner() as runner:
        try:
            who = runner.run(talker.open())
            conversation = Conversation(runner, talker, wishes, standard_output(), system)
            conversation.greet(who)
            conversation.go_on()
        finally:
            runner.run(talker.close())
