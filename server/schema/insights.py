"""`GET /insights`: what an operator should know."""

from __future__ import annotations

from typing import Literal

from server.schema.base import AnswerModel


class InsightBody(AnswerModel):
    """One thing worth knowing; in `evidence` and `measured_over` what was not measured is absent."""

    id: str
    severity: Literal["info", "notice", "warning", "critical"]
    title: str
    statement: str
    evidence: dict[str, int | float | str]
    measured_over: dict[str, int | float | str]
    since_unix_ms: int
    recommendation: str


class InsightsAnswer(AnswerModel):
    """How things stand at this moment."""

    generated_unix_ms: int
    status: Literal["ok", "degraded", "starting", "draining", "unavailable"]
    reuse: Literal["healthy", "degraded", "collapsed", "recovering"]
    insights: list[InsightBody]
