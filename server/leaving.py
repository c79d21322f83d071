"""What happens when a client does not wait for its answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from fastapi import Request
from starlette.requests import ClientDisconnect
from starlette.types import Receive

Result = TypeVar("Result")


async def until_disconnect(receive: Receive) -> None:
    """Return when the client has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_client_leaves(request: Request, work: Awaitable[Result]) -> Result:
    """Wait for the work and for the client's leaving at once; the latter cancels the former.

    Raises ClientDisconnect.
    """
    task = asyncio.ensure_future(work)
    leave = asyncio.ensure_future(until_disconnect(request.receive))
    try:
        await asyncio.wait({task, leave}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        for each in (task, leave):
            each.cancel()
        await asyncio.gather(task, leave, return_exceptions=True)
