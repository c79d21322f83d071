"""What Prometheus reads: requests and tokens as they end, and the engine's own counts at the moment of the scrape."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from enum import StrEnum

from prometheus_client import CollectorRegistry, Counter, Histogram, Info
from prometheus_client.exposition import choose_encoder

from engine.request import Delta
from engine.snapshot import EngineSnapshot
from ops.engine_collector import EngineCollector
from ops.outcome import Outcome
from ops.reuse_meter import ReuseMeter

_PREFIX = "dalsegno"
_LATENCY_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Reuse(StrEnum):
    """Whether any of the prompt was reused."""

    HIT = "hit"
    ROOT = "root"


class Metrics:
    """Owner of a registry of its own. Mutable: only the event loop's thread may touch it, but for `expose`."""

    def __init__(self, version: str, endpoints: Iterable[str], clock: Callable[[], float] = time.monotonic) -> None:
        """`endpoints` are the paths whose requests are counted."""
        self.clock = clock
        self._registry = registry = CollectorRegistry(auto_describe=True)
        Info(f"{_PREFIX}_build", "The version that runs.", registry=registry).info({"version": version})
        self._requests = Counter(
            f"{_PREFIX}_requests", "Requests that have ended.", ["endpoint", "outcome"], registry=registry
        )
        self._series = {
            (endpoint, outcome): self._requests.labels(endpoint, outcome.value)
            for endpoint in endpoints
            for outcome in Outcome
        }
        self._duration = _histogram(
            "request_duration_seconds", "From the first byte read to the last written.", registry
        )
        first_token = Histogram(
            f"{_PREFIX}_time_to_first_token_seconds",
            "From the submission to the first token, of answers that have ended.",
            ["reuse"],
            buckets=_LATENCY_SECONDS,
            registry=registry,
        )
        self.first_token = {reuse: first_token.labels(reuse.value) for reuse in Reuse}
        self.inter_token = _histogram("inter_token_latency_seconds", "Between two tokens of an answer.", registry)
        self.queue = _histogram("queue_seconds", "Wait for the first step, of answers that have ended.", registry)
        self.prompt_tokens = Counter(
            f"{_PREFIX}_prompt_tokens", "Tokens of the prompts whose answers have ended.", registry=registry
        )
        self.generation_tokens = Counter(f"{_PREFIX}_generation_tokens", "Tokens generated.", registry=registry)
        self.reuse = ReuseMeter(_PREFIX, registry)

    def watch_engine(self, snapshot: Callable[[], EngineSnapshot], model: str, architecture: str, backend: str) -> None:
        """Add the engine's counts. Call it once, when there is an engine."""
        info = Info(f"{_PREFIX}_model", "The model that is served.", registry=self._registry)
        info.info({"model": model, "architecture": architecture, "backend": backend})
        self._registry.register(EngineCollector(_PREFIX, snapshot))

    def request_ended(self, endpoint: str, outcome: Outcome, seconds: float) -> None:
        """Count a request, unless its endpoint is not counted."""
        series = self._series.get((endpoint, outcome))
        if series is not None:
            series.inc()
            self._duration.observe(seconds)

    def new_generation(self) -> GenerationMeter:
        """To be shown every delta of one answer."""
        return GenerationMeter(self)

    def expose(self, accept: str) -> tuple[bytes, str]:
        """The page in the format that a scraper's `accept` header asks for, and its content type."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type


class GenerationMeter:
    """Counts one answer as its consumer takes it. Mutable: one per answer."""

    __slots__ = ("_last_at", "_metrics", "_tokens")

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._last_at: float | None = None
        self._tokens = 0

    def __call__(self, delta: Delta) -> None:
        metrics, count = self._metrics, len(delta.token_ids)
        if count:
            now = metrics.clock()
            if self._last_at is not None:
                for _ in range(count):
                    metrics.inter_token.observe((now - self._last_at) / count)
            self._last_at = now
            self._tokens += count
            metrics.generation_tokens.inc(count)
        if delta.usage is None or delta.timings is None:
            return
        # The end token is generated too, though no delta holds it.
        metrics.generation_tokens.inc(delta.usage.completion_tokens - self._tokens)
        metrics.prompt_tokens.inc(delta.usage.prompt_tokens)
        if delta.reuse is not None:
            metrics.reuse.count(delta.reuse)
        if delta.timings.ttft_seconds is not None:
            reuse = Reuse.HIT if delta.usage.cached_tokens else Reuse.ROOT
            metrics.first_token[reuse].observe(delta.timings.ttft_seconds)
        if delta.timings.queue_seconds is not None:
            metrics.queue.observe(delta.timings.queue_seconds)


def _histogram(name: str, meaning: str, registry: CollectorRegistry) -> Histogram:
    return Histogram(f"{_PREFIX}_{name}", meaning, buckets=_LATENCY_SECONDS, registry=registry)
