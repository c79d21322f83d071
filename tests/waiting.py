"""How a test waits for what the engine's thread does."""

import asyncio

_SECONDS = 0.001


async def let_it_work() -> None:
    """One round of a loop that asks again and again. A loop of `asyncio.sleep(0)` would hold the interpreter's lock
    nearly all the time, and each operation of the engine's thread would wait for it."""
    await asyncio.sleep(_SECONDS)
