"""Counts what prompts reused, what they could have, and why the rest was computed."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter

from cache import ROOT_PATH, CheckpointKind, LossReason, ReuseReport, Tier

_COMPUTED = "computed"


class ReuseMeter:
    """Counters of prompt tokens, of answers that have ended. Mutable: only the event loop's thread may touch it."""

    def __init__(self, prefix: str, registry: CollectorRegistry) -> None:
        def labelled(name: str, meaning: str, label: str, values: Iterable[str]) -> dict[str, Counter]:
            family = Counter(f"{prefix}_{name}", meaning, [label], registry=registry)
            return {value: family.labels(value) for value in values}

        self._sources = labelled(
            "prompt_tokens_by_source",
            "Prompt tokens by where they came from.",
            "source",
            (_COMPUTED, *(tier.value for tier in Tier)),
        )
        self._selections = labelled(
            "reuse_selections",
            "Answers by what their prompt was resumed from.",
            "path",
            (ROOT_PATH, *(kind.value for kind in CheckpointKind)),
        )
        self._lost = labelled(
            "reuse_lost_tokens",
            "Prompt tokens that were not reused, by the reason.",
            "reason",
            (reason.value for reason in LossReason),
        )
        self._achievable = Counter(
            f"{prefix}_reuse_achievable_tokens", "Prompt tokens that had been computed before.", registry=registry
        )
        self._expected = Counter(
            f"{prefix}_reuse_expected_tokens",
            "Prompt tokens that a sound cache of the same size would have had.",
            registry=registry,
        )
        self.achieved = Counter(f"{prefix}_reuse_achieved_tokens", "Prompt tokens that were reused.", registry=registry)

    def count(self, reuse: ReuseReport) -> None:
        """Add one answer's prompt."""
        self._selections[reuse.path].inc()
        self._sources[_COMPUTED].inc(reuse.prompt_tokens - reuse.cached_tokens)
        for tier, tokens in reuse.source.items():
            self._sources[tier].inc(tokens)
        self.achieved.inc(reuse.cached_tokens)
        self._expected.inc(reuse.expected_tokens)
        self._achievable.inc(reuse.achievable_tokens)
        for reason, tokens in reuse.lost.items():
            self._lost[reason].inc(tokens)
