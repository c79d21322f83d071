"""Threads of its own for the work on text, so that no prompt keeps the event loop from streams and probes."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from engine.text.slices import Slices

Result = TypeVar("Result")

_THREADS = 2


class TextPool:
    """Each slice of work waits its turn anew, so a short text is never behind all of a long one."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(_THREADS, thread_name_prefix="dalsegno-text")

    async def run(self, work: Slices[Result]) -> Result:
        """The work's result. Cancelled, it ends behind the slice that runs. Raises what the work raises."""
        loop = asyncio.get_running_loop()
        while True:
            end = await loop.run_in_executor(self._executor, _next_slice, work)
            if end is not None:
                return end[0]

    def close(self) -> None:
        """What waits is cancelled, and what runs is not waited for."""
        self._executor.shutdown(wait=False, cancel_futures=True)


def _next_slice(work: Slices[Result]) -> tuple[Result] | None:
    try:
        next(work)
    except StopIteration as end:
        return (end.value,)
    return None
