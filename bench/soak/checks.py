"""What must be true of every answer, of every pause, and of the whole run; each breach is one line."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from bench.soak.client import Reply

RSS_GROWTH = 0.03
"""How much larger the daemon may be at the end than after the first tenth (S28)."""
TOLERANCE = 5e-3
"""By how much a log probability may differ from that of a cold run, whose batches and segments are others."""

LEAST_RETRY_HITS = 0.5
"""Some nine other requests run between the two, and leave about as many checkpoints as the pools hold: which of them
stay is the policy's choice, which prefers conversations that have come back before. A collapse lies far below."""
ENOUGH_RETRIES = 40
"""Fewer say nothing about a share."""

_SOME_REFUSALS = ("server_overloaded", "queue_timeout")


@dataclass(slots=True)
class Account:
    """What all answers said together, to hold against the daemon's own counters (S60). Mutable."""

    answers: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    host_tokens: int = 0

    def add(self, prompt_tokens: int, cached_tokens: int, host_tokens: int) -> None:
        self.answers += 1
        self.prompt_tokens += prompt_tokens
        self.cached_tokens += cached_tokens
        self.host_tokens += host_tokens

    def differences(self, counted: Account) -> list[str]:
        """One line for each that the daemon counts otherwise."""
        return [
            f"the answers say {name.replace('_', ' ')} {getattr(self, name):,}, the counters {getattr(counted, name):,}"
            for name in self.__dataclass_fields__
            if getattr(self, name) != getattr(counted, name)
        ]


@dataclass(slots=True)
class Retries:
    """The same body sent again right after it was answered, while others are served too. Mutable."""

    total: int = 0
    missed: list[str] = field(default_factory=list)

    def breaches(self) -> list[str]:
        """Meanwhile others leave more checkpoints than the pools hold, so some may miss; but only some."""
        hits = self.total - len(self.missed)
        if self.total < ENOUGH_RETRIES or hits >= LEAST_RETRY_HITS * self.total:
            return []
        return [f"only {hits} of {self.total} bodies that were sent again under load hit, such as: {self.missed[0]}"]


def breaches_of_reply(reply: Reply, *, must_be_refused: bool) -> list[str]:
    """Of one request that was read to its end."""
    name = reply.request_id
    if must_be_refused:
        return [] if reply.status == 400 else [f"{name}: a wrong body got {reply.status} {reply.error}, not 400"]
    if not reply.is_answered:
        return [] if reply.error in _SOME_REFUSALS else [f"{name}: got {reply.status} {reply.error}"]
    usage, reuse = reply.usage, reply.reuse
    prompt, cached = usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]
    source, lost = reuse["source"], reuse["lost"]
    claims = {
        "usage, reuse and timings agree about the cached tokens": cached
        == reuse["cached_tokens"]
        == reply.timings["cache_n"]
        == sum(source.values()),
        "usage and reuse agree about the prompt": prompt == reuse["prompt_tokens"],
        "prompt > cached >= host >= 0": prompt > cached >= source["host"] >= 0,
        "cached <= achievable < prompt": cached <= reuse["achievable_tokens"] < prompt,
        "cached and lost stay below the prompt": cached + sum(lost.values()) < prompt,
        "no loss is 0 or less": all(tokens > 0 for tokens in lost.values()),
        "a path other than root goes with cached tokens": (reuse["path"] == "root") == (cached == 0),
    }
    return [f"{name}: not so: {claim} ({usage}, {reuse})" for claim, holds in claims.items() if not holds]


def missed_again(first: Reply, again: Reply) -> str:
    """What is wrong with the second of two equal requests in a row; empty when it reused all that there was."""
    usage = again.usage
    if again.reuse["cached_tokens"] and not again.reuse["lost"]:
        return ""
    return f"{again.request_id}: sent right after {first.request_id}, reused {again.reuse} of {usage['prompt_tokens']}"


def breaches_of_pause(cache: dict[str, Any], violations: Iterable[str]) -> list[str]:
    """Of a daemon that nobody asks anything: `cache` is /admin/cache."""
    breaches = [f"the ledger: {line}" for line in violations]
    for pool, units in cache["pools"].items():
        breaches += [
            f"{units[state]} units of {pool} are {state} in a pause"
            for state in ("pinned", "in_flight")
            if units[state]
        ]
        if sum(units[state] for state in ("free", "cached", "pinned", "in_flight")) != units["capacity"]:
            breaches.append(f"the units of {pool} do not add up: {units}")
    return breaches


def difference_from_cold(warm: Reply, cold: Reply) -> str:
    """What a hit changed in a greedy answer; empty when nothing but rounding. A tie within the tolerance may fall
    either way, and ends the comparison."""
    for place, (got, expected) in enumerate(zip(warm.logprobs, cold.logprobs, strict=False)):
        difference = abs(got["logprob"] - expected["logprob"])
        if got["token"] == expected["token"]:
            if difference > TOLERANCE:
                return f"{warm.request_id}: token {place} has log probability off by {difference:.4f}"
            continue
        gap = expected["top_logprobs"][0]["logprob"] - expected["top_logprobs"][1]["logprob"]
        if gap > TOLERANCE:
            return f"{warm.request_id}: token {place} is {got['token']!r}, cold {expected['token']!r} by {gap:.4f}"
        return ""
    if len(warm.logprobs) != len(cold.logprobs):
        return f"{warm.request_id}: {len(warm.logprobs)} tokens, cold {len(cold.logprobs)}"
    return ""


def growth(rss_after_tenth: int, rss_at_end: int) -> str:
    """Empty when memory did not grow beyond the limit (S28)."""
    share = rss_at_end / rss_after_tenth - 1
    if share <= RSS_GROWTH:
        return ""
    return f"resident memory grew by {share:.1%}, from {rss_after_tenth / 2**20:.1f} to {rss_at_end / 2**20:.1f} MiB"
