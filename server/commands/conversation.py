"""A conversation at the terminal: what is typed, what is answered, and what each answer cost."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from typing import TYPE_CHECKING, Any

from engine.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.console import Console

    from server.commands.talk import Message, Talker, Wishes

_COMMANDS = {
    "/help": "show this",
    "/clear": "forget the conversation; the system prompt stays",
    "/system TEXT": "set the system prompt; without TEXT, show it",
    "/exit": "end; Ctrl-D does so too",
}
_HELP = (
    *(f"{command:<14}{meaning}" for command, meaning in _COMMANDS.items()),
    "Ctrl-C stops an answer, and ends where there is none.",
    "A line with a space before its / is sent as it is.",
)


class Conversation:
    """Remembers what was said. At a terminal it takes commands and tells what each answer cost; a file that is piped
    in is sent line by line, and only the answers come out."""

    def __init__(self, runner: asyncio.Runner, talker: Talker, wishes: Wishes, console: Console, system: str) -> None:
        self._runner = runner
        self._talker = talker
        self._wishes = wishes
        self._console = console
        self._system = system
        self._turns: list[Message] = []
        self._takes_commands = sys.stdin.isatty()
        self._is_watched = self._takes_commands and console.is_terminal

    def greet(self, who: str) -> None:
        """Say who answers, and how to end."""
        if self._is_watched:
            self._tell(f"dalsegno: {who}", "/help shows what can be typed; Ctrl-C stops an answer, Ctrl-D ends.", "")

    def go_on(self) -> None:
        """Until whoever types has enough."""
        if self._takes_commands:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  (gives input() its line editing)
        while True:
            try:
                line = input("you> " if self._is_watched else "")
            except (EOFError, KeyboardInterrupt):
                if self._is_watched:
                    print()
                return
            if not line.strip():
                continue
            if not line.isprintable() and any("\ud800" <= character <= "\udfff" for character in line):
                print("dalsegno: the line is not valid UTF-8; write it again", file=sys.stderr)
            elif self._takes_commands and line.startswith("/"):
                if line.split()[0] == "/exit":
                    return
                self._obey(*line.split(maxsplit=1))
            else:
                self._ask(line)

    def _obey(self, command: str, text: str = "") -> None:
        match command:
            case "/help":
                self._tell(*_HELP)
            case "/clear":
                self._turns.clear()
                self._tell("The conversation is forgotten.")
            case "/system" if text:
                self._system = text
                self._tell("The system prompt is set.")
            case "/system":
                self._tell(self._system or "There is no system prompt.")
            case _:
                self._tell(f"There is no {command}; /help shows what can be typed.")

    def _ask(self, line: str) -> None:
        asked: list[Message] = [*self._turns, {"role": "user", "content": line}]
        system: list[Message] = [{"role": "system", "content": self._system}] if self._system else []
        answer = _Answer(self._console)
        try:
            self._runner.run(answer.come(self._talker, [*system, *asked], self._wishes))
        except KeyboardInterrupt:
            print(" (stopped)")
        except EngineError as error:
            print(f"dalsegno: {error}", file=sys.stderr)
            return
        # A stopped answer stays in the history as far as it came: that is what the user saw.
        self._turns = [*asked, {"role": "assistant", "content": answer.content}]
        if self._is_watched:
            self._tell(answer.describe(), "")

    def _tell(self, *lines: str) -> None:
        for line in lines:
            self._console.out(line, style="dim", highlight=False)


class _Answer:
    """What the model says in one turn, printed as it comes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._first_piece_seconds: float | None = None
        self._cost: Mapping[str, Any] = {}
        self._is_cut = False
        self.content = ""

    async def come(self, talker: Talker, messages: list[Message], wishes: Wishes) -> None:
        asked, is_thinking = time.perf_counter(), False
        pieces = talker.answer(messages, wishes)
        try:
            async for piece in pieces:
                if self._first_piece_seconds is None and (piece.reasoning or piece.content):
                    self._first_piece_seconds = time.perf_counter() - asked
                if piece.reasoning:
                    self._console.out(piece.reasoning, end="", style="dim", highlight=False)
                    is_thinking = True
                if piece.content:
                    if is_thinking:
                        print("\n")
                        is_thinking = False
                    print(piece.content, end="", flush=True)
                    self.content += piece.content
                self._cost = piece.cost or self._cost
                self._is_cut = self._is_cut or piece.finish_reason == "length"
        finally:
            await pieces.aclose()
            print()

    def describe(self) -> str:
        """What the answer cost, in one line; an answer that was stopped has no figures of the daemon's."""
        told = []
        if self._first_piece_seconds is not None:
            told.append(f"first token after {self._first_piece_seconds * 1000:,.0f} ms")
        if self._cost:
            reuse, timings = self._cost["reuse"], self._cost["timings"]
            told.insert(0, f"reused {reuse['cached_tokens']:,} of {reuse['prompt_tokens']:,} prompt tokens")
            told.append(f"{timings['predicted_n']:,} tokens at {timings['predicted_per_second']:,.1f} per second")
        if self._is_cut:
            told.append("cut at the most tokens an answer may have")
        return ", ".join(told)
