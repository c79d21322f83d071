"""Threads of its own for the work on text, so that no prompt keeps the event loop from streams and probes."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

from engine.text.slices import LONG, Slices

Result = TypeVar("Result")

_THREADS = 2


class TextPool:
    """Each slice of work waits its turn anew, so a short text is never behind all of a long one; slices that take
    seconds have a thread of their own, and wait for each other."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(_THREADS, thread_name_prefix="dalsegno-text")
        self._long = ThreadPoolExecutor(1, thread_name_prefix="dalsegno-long-text")

    async def run(self, work: Slices[Result]) -> Result:
        """The work's result. Cancelled, it ends behind the slice that runs. Raises what the work raises."""
        loop = asyncio.get_running_loop()
        executor = self._executor
        while True:
            slice_ = await loop.run_in_executor(executor, _next_slice, work)
            if isinstance(slice_, _End):
                return slice_.result
            executor = self._long if slice_ is LONG else self._executor

    def close(self) -> None:
        """What waits is cancelled, and what runs is not waited for."""
        for executor in (self._executor, self._long):
            executor.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True, slots=True)
class _End(Generic[Result]):
    result: Result


def _next_slice(work: Slices[Result]) -> _End[Result] | bool:
    try:
        return next(work)
    except StopIteration as end:
        return _End(end.value)
