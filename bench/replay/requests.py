"""The one record that every reader and generator makes, and that the simulator serves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from cache import Frontier
from engine.errors import UnusableOptionError

Symbols = tuple[int, ...]


class TraceError(UnusableOptionError):
    """A trace cannot be read (exit code 2); the message names the line, the field, what was found, and the remedy."""


@dataclass(frozen=True, slots=True)
class SimRequest:
    """One request. A symbol stands for `Trace.tokens_per_symbol` tokens: equal symbols are equal tokens."""

    number: int
    """Its place in the trace, from 0."""
    arrival_seconds: float
    """From the trace's start; it is sent then, or when the request before it in its thread was answered."""
    thread: str
    """Requests of a thread are sent one after the other: a conversation, or one sub-agent's tool loop."""
    namespace: str
    prompt: Symbols
    prompt_tokens: int
    """Exactly; the last symbol may stand for fewer than the others."""
    answer: Symbols
    """Empty where the trace does not say what was answered: the state after the answer is worth nothing then."""
    output_tokens: int
    frontiers: tuple[Frontier, ...]
    """Where it is likely to be resumed, in symbols. See engine.frontiers.prompt_frontiers."""


class Trace(Protocol):
    """Requests in the order of their arrival, the same each time they are asked for."""

    name: str
    tokens_per_symbol: int

    def __len__(self) -> int: ...

    def requests(self) -> Iterator[SimRequest]: ...
