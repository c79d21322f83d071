"""What an operator, a balancer and an alert would see of the daemon in a drill."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from bench.soak.client import SoakClient
from server.watch.source import parse_metrics

_LOOK_AGAIN_SECONDS = 0.1

COLLAPSED = "prefix.reuse_collapsed"


class Probes:
    """Asks one daemon."""

    def __init__(self, client: SoakClient) -> None:
        self._client = client

    async def health(self) -> dict[str, Any]:
        found: dict[str, Any] = (await self._client.get("/health")).json()
        return found

    async def reuse(self) -> str:
        """The state of reuse."""
        return str((await self.health()).get("reuse"))

    async def readiness(self) -> tuple[int, int]:
        """The status of /readyz, and of the strict one."""
        plain, strict = await self._client.get("/readyz"), await self._client.get("/readyz?strict=reuse")
        return plain.status_code, strict.status_code

    async def insight(self, insight_id: str) -> dict[str, Any] | None:
        """None while it does not hold."""
        found = (await self._client.get("/insights")).json()["insights"]
        return next((each for each in found if each["id"] == insight_id), None)

    async def metrics(self) -> dict[str, float]:
        return parse_metrics((await self._client.get("/metrics")).text)

    async def set_faults(self, *names: str) -> None:
        (await self._client.post("/admin/faults", {"faults": list(names)})).raise_for_status()

    async def audit(self) -> dict[str, Any]:
        found: dict[str, Any] = (await self._client.post("/admin/cache/audit")).raise_for_status().json()
        return found

    async def reset(self, *tiers: str) -> dict[str, Any]:
        found: dict[str, Any] = (await self._client.post("/admin/cache/reset", {"tiers": list(tiers)})).json()
        return found


async def until(condition: Callable[[], Awaitable[bool]], seconds: float) -> bool:
    """Look again and again; False when the time is over first."""
    end = time.monotonic() + seconds
    while not await condition():
        if time.monotonic() > end:
            return False
        await asyncio.sleep(_LOOK_AGAIN_SECONDS)
    return True
