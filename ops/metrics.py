"""What Prometheus reads: requests and tokens as they end, and the engine's own counts at the moment of the scrape."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum

from prometheus_client import CollectorRegistry, Counter, Histogram, Info, ProcessCollector, disable_created_metrics
from prometheus_client.core import CounterMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from engine.distribution import LATENCY_BOUNDS_SECONDS
from engine.events import RequestEnded
from engine.request import Delta, FinishReason
from engine.snapshot import EngineSnapshot
from ops.connections import ConnectionCollector, ConnectionSource
from ops.engine_collector import EngineCollector
from ops.insight_metrics import InsightCollector, InsightSource
from ops.outcome import Outcome
from ops.reuse_meter import ReuseMeter
from ops.vllm_metrics import AnswerMetrics, VllmCollector

_PREFIX = "dalsegno"

disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series beside each, which nobody reads


class Reuse(StrEnum):
    """Whether any of the prompt was reused."""

    HIT = "hit"
    ROOT = "root"


class Compat(StrEnum):
    """Whose names are exported beside our own."""

    NONE = "none"
    VLLM = "vllm"


class Metrics:
    """Owner of a registry of its own. Mutable: only the event loop's thread may touch it."""

    def __init__(
        self,
        version: str,
        endpoints: Iterable[str],
        clock: Callable[[], float] = time.monotonic,
        *,
        compat: Compat = Compat.NONE,
    ) -> None:
        """`endpoints` are the paths whose requests are counted."""
        self.clock = clock
        self._compat = compat
        self._registry = registry = CollectorRegistry(auto_describe=True)
        ProcessCollector(registry=registry)
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
        self._first_token = Histogram(
            f"{_PREFIX}_time_to_first_token_seconds",
            "From the submission to the first token, of answers that have ended.",
            ["reuse"],
            buckets=LATENCY_BOUNDS_SECONDS,
            registry=registry,
        )
        self.first_token = {reuse: self._first_token.labels(reuse.value) for reuse in Reuse}
        prefill = Histogram(
            f"{_PREFIX}_prefill_seconds",
            "What a prompt itself took, copying what it reuses and computing the rest, without any wait for others.",
            ["reuse"],
            buckets=LATENCY_BOUNDS_SECONDS,
            registry=registry,
        )
        self.prefill = {reuse: prefill.labels(reuse.value) for reuse in Reuse}
        self.inter_token = _histogram("inter_token_latency_seconds", "Between two tokens of an answer.", registry)
        self.queue = _histogram("queue_seconds", "Wait for the first step, of answers that have ended.", registry)
        self.stalled = _histogram(
            "stalled_seconds", "Let in, but others' prompts were computed, of answers that have ended.", registry
        )
        self.preempted = _histogram(
            "preempted_seconds",
            "Set aside for others until it was where it had been, of answers that have ended.",
            registry,
        )
        self.prompt_tokens = Counter(
            f"{_PREFIX}_prompt_tokens", "Tokens of the prompts whose answers have ended.", registry=registry
        )
        self.generation_tokens = Counter(f"{_PREFIX}_generation_tokens", "Tokens generated.", registry=registry)
        self.reuse = ReuseMeter(_PREFIX, registry)
        self._event_log = _EventLogCollector()
        registry.register(self._event_log)
        self._connections = ConnectionCollector(_PREFIX)
        registry.register(self._connections)

    def watch_insights(self, insights: InsightSource) -> None:
        """Add how reuse fares and which insights hold. Call it once; it needs no engine."""
        self._registry.register(InsightCollector(_PREFIX, insights))

    def watch_event_log(self, lost_lines: Callable[[], int]) -> None:
        """Say from now on how many lines the event log could not write; without a log it is 0."""
        self._event_log.lost_lines = lost_lines

    def watch_connections(self, connections: ConnectionSource) -> None:
        """Say from now on how many connections there are and why any was ended; where nothing listens all is 0."""
        self._connections.source = connections

    def watch_engine(self, snapshot: Callable[[], EngineSnapshot], model: str, architecture: str, backend: str) -> None:
        """Add the engine's counts. Call it once, when there is an engine."""
        info = Info(f"{_PREFIX}_model", "The model that is served.", registry=self._registry)
        info.info({"model": model, "architecture": architecture, "backend": backend})
        self._registry.register(EngineCollector(_PREFIX, snapshot))
        if self._compat is Compat.VLLM:
            answers = AnswerMetrics(self.prompt_tokens, self.generation_tokens, self.reuse.achieved, self._first_token)
            self._registry.register(VllmCollector(model, snapshot, answers))

    def request_ended(self, endpoint: str, outcome: Outcome, seconds: float) -> None:
        """Count a request, unless its endpoint is not counted."""
        series = self._series.get((endpoint, outcome))
        if series is not None:
            series.inc()
            self._duration.observe(seconds)

    def answer_ended(self, ended: RequestEnded) -> None:
        """Count what an answer that came to its own end has cost; one that was broken off tells of no whole prompt."""
        if ended.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH):
            return
        self.prompt_tokens.inc(ended.usage.prompt_tokens)
        if ended.reuse is not None:
            self.reuse.count(ended.reuse)
        timings = ended.timings
        reuse = Reuse.HIT if ended.usage.cached_tokens else Reuse.ROOT
        if timings.prefill_seconds is not None:
            self.prefill[reuse].observe(timings.prefill_seconds + (timings.restore_seconds or 0.0))
        for histogram, seconds in (
            (self.first_token[reuse], timings.ttft_seconds),
            (self.queue, timings.queue_seconds),
            (self.stalled, timings.stalled_seconds),
            (self.preempted, timings.preempted_seconds),
        ):
            if seconds is not None:
                histogram.observe(seconds)

    def new_generation(self) -> GenerationMeter:
        """To be shown every delta of one answer."""
        return GenerationMeter(self)

    def expose(self, accept: str) -> tuple[bytes, str]:
        """The page in the format that a scraper's `accept` header asks for, and its content type."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type


class GenerationMeter:
    """Counts the tokens of one answer as its consumer takes them. Mutable: one per answer."""

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
        if delta.usage is not None:
            # The end token is generated too, though no delta holds it.
            metrics.generation_tokens.inc(delta.usage.completion_tokens - self._tokens)


class _EventLogCollector(Collector):
    """Asks the event log at each scrape."""

    def __init__(self) -> None:
        self.lost_lines: Callable[[], int] = lambda: 0

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily(
            f"{_PREFIX}_event_log_lost_lines", "Events that the event log could not write.", value=self.lost_lines()
        )


def _histogram(name: str, meaning: str, registry: CollectorRegistry) -> Histogram:
    return Histogram(f"{_PREFIX}_{name}", meaning, buckets=LATENCY_BOUNDS_SECONDS, registry=registry)
