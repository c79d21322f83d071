"""Finds stop strings in text that comes in pieces, and holds back what could still become one."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Streaming matcher, whatever the borders of the pieces. Mutable: one per answer.

    The string that is complete first wins; among those that end together, the longest. Work is linear in the text
    (Knuth, Morris and Pratt, 1977).
    """

    def __init__(self, strings: Sequence[str], *, includes_stop: bool = False) -> None:
        """`strings` are not empty. `includes_stop` leaves the string that was found in the text."""
        self._patterns = [(string, _failures(string)) for string in sorted(strings, key=len, reverse=True)]
        self._includes_stop = includes_stop
        self._matched = [0] * len(self._patterns)
        self._held = ""
        self.is_found = False

    @property
    def held_characters(self) -> int:
        """Length of the text that was taken and not yet given out."""
        return len(self._held)

    def push(self, text: str) -> str:
        """Take the next piece; returns the text that is certain. After a find, everything that follows is dropped."""
        if self.is_found:
            return ""
        before = len(self._held)
        self._held += text
        for place, character in enumerate(text):
            length = self._advance(character)
            if length:
                end = before + place + 1
                self.is_found = True
                certain, self._held = self._held[: end if self._includes_stop else end - length], ""
                return certain
        keep = max(self._matched, default=0)
        certain, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return certain

    def flush(self) -> str:
        """The text has ended: what was held back."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> int:
        """Length of the string that this character completes; 0 for none."""
        found = 0
        for index, (string, failures) in enumerate(self._patterns):
            length = self._matched[index]
            while length and string[length] != character:
                length = failures[length - 1]
            length += string[length] == character
            self._matched[index] = length
            if length == len(string) and not found:
                found = length
        return found


def _failures(string: str) -> list[int]:
    """For each place the length of the longest proper beginning of `string` that ends there."""
    failures = [0] * len(string)
    length = 0
    for place in range(1, len(string)):
        while length and string[place] != string[length]:
            length = failures[length - 1]
        length += string[place] == string[length]
        failures[place] = length
    return failures
