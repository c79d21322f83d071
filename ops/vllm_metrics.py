"""The names that routers and autoscalers scrape from vLLM, from the same numbers as our own."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client import Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from cache import PoolCounts
from engine.snapshot import EngineSnapshot

_LABELS = ("model_name", "engine")
_ENGINE = "0"
"""vLLM numbers the engines behind one door; here there is one."""


@dataclass(frozen=True, slots=True)
class AnswerMetrics:
    """Our own metrics of answers, of which vLLM has a name too; what we split by a label, it does not."""

    prompt_tokens: Counter
    generation_tokens: Counter
    reused_tokens: Counter
    first_token: Histogram


class VllmCollector(Collector):
    """Reads a snapshot and our own metrics at each scrape."""

    def __init__(self, model: str, snapshot: Callable[[], EngineSnapshot], answers: AnswerMetrics) -> None:
        self._labels = (model, _ENGINE)
        self._snapshot = snapshot
        self._answers = answers

    def describe(self) -> Iterator[Metric]:
        return self.collect()

    def collect(self) -> Iterator[Metric]:
        now, answers = self._snapshot(), self._answers
        yield self._gauge("num_requests_running", "Requests that hold pages and a slot.", now.running)
        yield self._gauge("num_requests_waiting", "Requests that wait for room.", now.waiting)
        yield self._gauge(
            "kv_cache_usage_perc",
            "Share of the KV pages on the device that requests hold, 0 to 1.",
            _usage(now.kv_pages),
        )
        prompt_tokens = _total(answers.prompt_tokens)
        yield self._counter("prefix_cache_queries", "Prompt tokens that were looked up in the cache.", prompt_tokens)
        yield self._counter("prefix_cache_hits", "Prompt tokens that were reused.", _total(answers.reused_tokens))
        yield self._counter("prompt_tokens", "Tokens of prompts.", prompt_tokens)
        yield self._counter("generation_tokens", "Tokens generated.", _total(answers.generation_tokens))
        yield self._first_token(answers.first_token)

    def _gauge(self, name: str, meaning: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", meaning, labels=_LABELS)
        family.add_metric(self._labels, value)
        return family

    def _counter(self, name: str, meaning: str, value: float) -> Metric:
        family = CounterMetricFamily(f"vllm:{name}", meaning, labels=_LABELS)
        family.add_metric(self._labels, value)
        return family

    def _first_token(self, ours: Histogram) -> Metric:
        below: Tally[str] = Tally()
        seconds = 0.0
        for family in ours.collect():
            for sample in family.samples:
                if sample.name.endswith("_bucket"):
                    below[sample.labels["le"]] += int(sample.value)
                elif sample.name.endswith("_sum"):
                    seconds += sample.value
        family = HistogramMetricFamily(
            "vllm:time_to_first_token_seconds", "From the submission to the first token.", labels=_LABELS
        )
        family.add_metric(self._labels, list(below.items()), seconds)
        return family


def _usage(pages: PoolCounts) -> float:
    """As vLLM has it, where a page that is cached and held by nobody counts as free."""
    return (pages.pinned + pages.in_flight) / pages.capacity if pages.capacity else 0.0


def _total(counter: Counter) -> float:
    return sum(
        sample.value for family in counter.collect() for sample in family.samples if sample.name.endswith("_total")
    )
