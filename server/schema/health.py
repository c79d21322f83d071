"""`GET /health` and the probes."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


class Probe(BaseModel):
    """A probe's answer."""

    model_config = ConfigDict(frozen=True)

    status: Literal["ok", "starting", "draining", "unavailable"]


class HealthBody(Probe):
    """`reasons` says why the status is not ok."""

    reasons: list[str]
