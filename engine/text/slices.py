"""Work on text in slices, so that who asked for it can leave in between, and others have their turn."""

from __future__ import annotations

from collections.abc import Generator
from typing import Final, TypeVar

Result = TypeVar("Result")

LONG: Final = True
"""What is yielded before a slice that may take seconds, for it cannot be cut: False before any other."""

Slices = Generator[bool, None, Result]
"""Work that stops before each further slice, and returns its result at the end."""


def in_one_go(work: Slices[Result]) -> Result:
    """The result, without a stop."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: Result = end.value
            return result
