"""How a test waits: for an event, and never by the clock.

Everything that is waited for has one deadline, so long that only what never comes exceeds it, also on a slow machine
whose cores other programs take.
"""

import asyncio

PATIENCE_SECONDS = 240.0
_SECONDS = 0.001


async def let_it_work() -> None:
    """One round of a loop that asks again and again. A loop of `asyncio.sleep(0)` would hold the interpreter's lock
    nearly all the time, and each operation of the engine's thread would wait for it."""
    await asyncio.sleep(_SECONDS)
