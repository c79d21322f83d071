"""What a daemon's answers hold, as far as a watcher reads them; anything that another version leaves out is absent."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


def _printable(text: Any) -> Any:
    """Nothing that a daemon says may move the cursor of who watches it."""
    if not isinstance(text, str):
        return text
    return "".join(character if character.isprintable() else " " for character in text)


Text = Annotated[str, BeforeValidator(_printable)]


class Body(BaseModel):
    """Base of all: unknown fields are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())


class HealthBody(Body):
    """`GET /health`. `reuse` is absent while nothing is served."""

    status: Text
    reasons: tuple[Text, ...] = ()
    reuse: Text | None = None


class InsightBody(Body):
    """One thing that the daemon has noticed about itself."""

    id: Text
    severity: Text = "info"
    title: Text
    statement: Text = ""
    recommendation: Text = ""
    since_unix_ms: int | None = None


class InsightsBody(Body):
    """`GET /insights`."""

    insights: tuple[InsightBody, ...]


class PoolBody(Body):
    """Units of a pool by state."""

    capacity: int
    free: int
    cached: int
    pinned: int
    in_flight: int


class CacheBody(Body):
    """`GET /admin/cache`: totals count from the start."""

    pools: dict[Text, PoolBody]
    requests_running: int | None = None
    requests_waiting: int | None = None


class PointTokens(Body):
    """Tokens that were computed."""

    prefill: int = 0
    decode: int = 0


class PointScheduler(Body):
    """Requests at the end of the interval."""

    running: int | None = None
    waiting: int | None = None


class PointCache(Body):
    """What the prompts of the interval reused."""

    selections: dict[Text, int] = Field(default_factory=dict)
    reused_tokens: int = 0
    achievable_tokens: int = 0
    expected_tokens: int | None = None
    lost_tokens: dict[Text, int] = Field(default_factory=dict)


class PointBody(Body):
    """One interval."""

    timestamp_unix_ms: int
    interval_seconds: float = 0.0
    tokens: PointTokens = PointTokens()
    scheduler: PointScheduler = PointScheduler()
    context_cache: PointCache = PointCache()


class HistoryBody(Body):
    """`GET /admin/history`, oldest first."""

    points: tuple[PointBody, ...]


class ResultBody(Body):
    """What one answer cost; `reuse` is the path."""

    prompt_tokens: int
    cached_tokens: int = 0
    completion_tokens: int = 0
    achievable_tokens: int = 0
    reuse: Text = ""
    lost: dict[Text, int] = Field(default_factory=dict)


class TimingsBody(Body):
    """Seconds; a phase that was not reached is absent."""

    ttft: float | None = None
    decode: float | None = None
    total: float | None = None


class AnswerBody(Body):
    """One answer of a request."""

    id: Text
    finish_reason: Text | None = None
    result: ResultBody | None = None
    timings_seconds: TimingsBody | None = None


class RequestBody(Body):
    """One request; `outcome` is absent while it runs."""

    request_id: Text
    endpoint: Text
    started_unix_ms: int | None = None
    outcome: Text | None = None
    answers: tuple[AnswerBody, ...] = ()


class RequestsBody(Body):
    """`GET /admin/requests`, newest first."""

    requests: tuple[RequestBody, ...]
