"""Lets any number of readers wait until something has changed."""

from __future__ import annotations

import asyncio


class Changes:
    """Counts changes. Mutable: only the event loop's thread may touch it."""

    def __init__(self) -> None:
        self.count = 0
        self._next = asyncio.Event()

    def happened(self) -> None:
        """Wake everyone who waits."""
        self.count += 1
        self._next.set()
        self._next = asyncio.Event()

    async def wait(self, seen: int) -> int:
        """Returns the count once it is no longer `seen`."""
        while self.count == seen:
            await self._next.wait()
        return self.count
