"""`GET /health` and the probes."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from server.schema.admin import FaultName


class Probe(BaseModel):
    """A probe's answer."""

    model_config = ConfigDict(frozen=True)

    status: Literal["ok", "degraded", "starting", "draining", "unavailable"]


class HealthBody(Probe):
    """`reasons` says why the status is not ok; `reuse` how reuse of prompts fares; `faults` names those of a fire drill
    that are on; `drained` is true where an operator drained it, which POST /admin/undrain ends."""

    reasons: list[str]
    reuse: Literal["healthy", "degraded", "collapsed", "recovering"]
    faults: list[FaultName]
    drained: bool


class VersionBody(BaseModel):
    """The version that serves."""

    model_config = ConfigDict(frozen=True)

    version: str
