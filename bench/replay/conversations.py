"""The native trace: calls made of messages, each with what it contains by name; JSON lines, read and written."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from bench.replay.requests import SimRequest, Symbols, TraceError
from cache import CheckpointKind, Frontier

TOKENS_PER_SYMBOL = 16
ROLES = ("system", "user", "assistant", "tool")
_OPENING = "the assistant's turn opens"
_THINKING = "and so does its thinking"


class Message(NamedTuple):
    """Messages with the same content have the same tokens, whatever their role."""

    role: str
    content: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Call:
    """One request of a conversation: all messages so far, and what is answered."""

    at_seconds: float
    thread: str
    messages: tuple[Message, ...]
    answer: Message
    thinking_tokens: int = 0
    """Computed before the answer, and left out when the answer is sent back in a later call."""
    namespace: str = ""


class ConversationTrace:
    """Calls as requests. Each message is rounded up to whole symbols of 16 tokens, of which pages are multiples."""

    tokens_per_symbol = TOKENS_PER_SYMBOL

    def __init__(self, name: str, calls: Sequence[Call]) -> None:
        self.name = name
        self._calls = calls

    def __len__(self) -> int:
        return len(self._calls)

    def requests(self) -> Iterator[SimRequest]:
        alphabet = _Alphabet()
        opening = alphabet.of(_OPENING, 1)
        thinking = alphabet.of(_THINKING, 1)
        for number, call in enumerate(self._calls):
            yield _request(number, call, alphabet, opening, thinking)


class _Alphabet:
    """Gives each content its symbols, the same whenever it comes again. Mutable in what it has met."""

    def __init__(self) -> None:
        self._known: dict[str, Symbols] = {}
        self._next = 0

    def of(self, content: str, tokens: int) -> Symbols:
        """The first of the content's symbols, as many as `tokens` need."""
        wanted = -(-tokens // TOKENS_PER_SYMBOL)
        known = self._known.get(content, ())
        missing = wanted - len(known)
        if missing > 0:
            known = (*known, *range(self._next, self._next + missing))
            self._next += missing
            self._known[content] = known
        return known if missing >= 0 else known[:wanted]


def _request(number: int, call: Call, alphabet: _Alphabet, opening: Symbols, thinking: Symbols) -> SimRequest:
    symbols: list[int] = []
    stable = 0
    is_leading = True
    for message in call.messages:
        is_leading = is_leading and message.role == "system"
        if message.role == "assistant":
            symbols += opening
        symbols += alphabet.of(message.content, message.tokens)
        if is_leading:
            stable = len(symbols)
    closure = len(symbols)
    frontiers = [Frontier(stable, CheckpointKind.SHARED_STABLE_PREFIX)] if 0 < stable < closure else []
    frontiers.append(Frontier(closure, CheckpointKind.PRIVATE_TURN_CLOSURE))
    thoughts = alphabet.of(f"{call.answer.content} thinking", call.thinking_tokens) if call.thinking_tokens else ()
    symbols += thinking if thoughts else opening
    return SimRequest(
        number=number,
        arrival_seconds=call.at_seconds,
        thread=call.thread,
        namespace=call.namespace,
        prompt=tuple(symbols),
        prompt_tokens=len(symbols) * TOKENS_PER_SYMBOL,
        answer=(*thoughts, *alphabet.of(call.answer.content, call.answer.tokens)),
        output_tokens=call.thinking_tokens + call.answer.tokens,
        frontiers=tuple(frontiers),
    )


def write_conversations(path: Path, calls: Iterable[Call]) -> int:
    """One line for each call; returns how many."""
    written = 0
    with path.open("w", encoding="utf-8") as lines:
        for call in calls:
            record = {
                "at_seconds": round(call.at_seconds, 3),
                "thread": call.thread,
                "messages": [list(message) for message in call.messages],
                "answer": [call.answer.content, call.answer.tokens],
            }
            record |= {"thinking_tokens": call.thinking_tokens} if call.thinking_tokens else {}
            record |= {"namespace": call.namespace} if call.namespace else {}
            lines.write(json.dumps(record, separators=(",", ":")) + "\n")
            written += 1
    return written


def read_conversations(path: Path, stretch: float = 1.0) -> ConversationTrace:
    """`stretch` multiplies the time between calls. Raises TraceError, also for lines out of order."""
    calls: list[Call] = []
    with path.open(encoding="utf-8") as lines:
        for line_number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            call = _Line(line, f"{path}, line {line_number}").call(stretch)
            if calls and call.at_seconds < calls[-1].at_seconds:
                raise TraceError(
                    f"{path}, line {line_number}: field 'at_seconds' goes back, {call.at_seconds / stretch:g} after "
                    f"{calls[-1].at_seconds / stretch:g}; sort the lines by at_seconds"
                )
            calls.append(call)
    return ConversationTrace(path.name, calls)


class _Line:
    """One line under inspection."""

    def __init__(self, line: str, where: str) -> None:
        self._where = where
        try:
            self._record: Any = json.loads(line)
        except json.JSONDecodeError as error:
            raise TraceError(
                f"{where}: not JSON ({error.msg} at column {error.colno}); repair or drop the line"
            ) from None
        if not isinstance(self._record, dict):
            raise self._wrong("the line", self._record, "a JSON object")
        known = {"at_seconds", "thread", "namespace", "messages", "answer", "thinking_tokens"}
        for name in self._record.keys() - known:
            raise TraceError(f"{where}: unknown field {name!r}, expected one of {', '.join(sorted(known))}; remove it")

    def call(self, stretch: float) -> Call:
        at_seconds = self._record.get("at_seconds")
        if isinstance(at_seconds, bool) or not isinstance(at_seconds, int | float) or not 0 <= at_seconds < math.inf:
            raise self._wrong("field 'at_seconds'", at_seconds, "a number of seconds of at least 0")
        messages = self._record.get("messages")
        if not isinstance(messages, list) or not messages:
            raise self._wrong("field 'messages'", messages, "a list with at least one [role, content, tokens]")
        thinking = self._record.get("thinking_tokens", 0)
        if not _is_count(thinking, 0):
            raise self._wrong("field 'thinking_tokens'", thinking, "a whole number of at least 0")
        answer = self._record.get("answer")
        if not isinstance(answer, list) or len(answer) != 2 or not _is_piece(answer[0], answer[1]):
            raise self._wrong("field 'answer'", answer, "[content, tokens], a name and a whole number of at least 1")
        return Call(
            at_seconds=at_seconds * stretch,
            thread=self._text("thread"),
            messages=tuple(self._message(number, message) for number, message in enumerate(messages)),
            answer=Message("assistant", answer[0], answer[1]),
            thinking_tokens=thinking,
            namespace=self._text("namespace", ""),
        )

    def _text(self, name: str, default: str | None = None) -> str:
        found = self._record.get(name, default)
        if not isinstance(found, str):
            raise self._wrong(f"field {name!r}", found, "a string")
        return found

    def _message(self, number: int, message: Any) -> Message:
        if not isinstance(message, list) or len(message) != 3 or not _is_piece(message[1], message[2]):
            raise self._wrong(f"field 'messages[{number}]'", message, "[role, content, tokens], tokens at least 1")
        if message[0] not in ROLES:
            raise self._wrong(f"the role in field 'messages[{number}]'", message[0], f"one of {', '.join(ROLES)}")
        return Message(*message)

    def _wrong(self, what: str, found: object, expected: str) -> TraceError:
        return TraceError(f"{self._where}: {what} is {found!r:.80}, expected {expected}; repair or drop the line")


def _is_piece(content: object, tokens: object) -> bool:
    return isinstance(content, str) and _is_count(tokens, 1)


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
