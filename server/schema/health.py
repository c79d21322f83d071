"""`GET /health` and the probes."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


class Probe(BaseModel):
    """A probe's answer."""

    model_config = ConfigDict(frozen=True)

    status: Literal["ok", "degraded", "starting", "draining", "unavailable"]


class HealthBody(Probe):
    """`reasons` says why the status is not ok; `reuse` how reuse of prompts fares."""

    reasons: list[str]
    reuse: Literal["healthy", "degraded", "collapsed", "recovering"]
