"""How soon checkpoints are used again: learned from what came back, and from what did not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from cache.types import CheckpointKind

IDLE_BINS = 16
"""Idle time is told in octaves: below 1 s, then from 2^(b-1) s to 2^b s; the last bin is open (from 4.5 hours)."""

PRIOR_ARRIVALS = 100.0
"""How many arrivals the prior weighs: what a group itself does outweighs it after as many."""

MEMORY_ARRIVALS = 1000.0
"""A group that has seen as many arrivals forgets half of what it knows, so that it follows the traffic."""

RETURN_PROBABILITY = (0.29, 0.40, 0.55, 0.76)
"""The chance that a conversation goes on after turn 1, 2..3, 4..7, 8 and more.

This prior and those below are counts over the first half of the public Mooncake conversation trace (FAST'25; 6,015
requests, half an hour): how many prompts came back, extended, as the beginning of a later one, and after how long.
"""

LENGTH_FACTOR = (1.29, 1.12, 0.87, 0.78)
"""How that chance depends on the prompt's length: below 2k, 8k and 32k tokens, and above. Source as above."""

SHARED_PROBABILITY = (0.28, 0.28, 0.83, 0.92, 0.95)
"""The chance that a shared prefix is used again after 0, 1..2, 3..6, 7..14, 15 and more uses. Source as above."""

IDLE_SHARE = (0.0, 0.0, 0.0, 0.003, 0.016, 0.041, 0.178, 0.289, 0.22, 0.184, 0.063, 0.006, 0.0, 0.0, 0.0, 0.0)
"""When those came back that did: the share of each idle bin. Source as above."""

KIND_FACTOR = {CheckpointKind.PRIVATE_ENDPOINT: 0.5, CheckpointKind.PRIVATE_LONG_ANCHOR: 0.1}
"""A judgement, since no public trace tells: an endpoint returns only for clients that echo the answer exactly, an
anchor only for a fork."""


class Returning(Protocol):
    """What the chance of a return is judged by."""

    @property
    def kind(self) -> CheckpointKind: ...
    @property
    def turns(self) -> int:
        """Turns of its conversation so far, 1 for the first."""

    @property
    def uses(self) -> int:
        """How often a request was resumed from it."""

    @property
    def frontier_tokens(self) -> int: ...


class Group(NamedTuple):
    """Checkpoints that are expected to behave alike. `length` is 0 for shared ones, and `step` counts their uses."""

    kind: CheckpointKind
    step: int
    length: int


def group_of(entry: Returning) -> Group:
    """Kind, and how proven it is in octaves: of its conversation's turns, or of its own uses where it is shared."""
    if entry.kind.is_shared:
        return Group(entry.kind, min(_octave(entry.uses + 1), len(SHARED_PROBABILITY) - 1), 0)
    step = min(_octave(entry.turns), len(RETURN_PROBABILITY) - 1)
    return Group(entry.kind, step, min(_octave(entry.frontier_tokens // 512) // 2, len(LENGTH_FACTOR) - 1))


def idle_bin(idle_seconds: float) -> int:
    """The bin of IDLE_BINS that an idle time falls into."""
    return min(int(idle_seconds).bit_length(), IDLE_BINS - 1) if idle_seconds > 0 else 0


def bin_start_seconds(idle_bin: int) -> float:
    """The shortest idle time of a bin; the bin is as wide as it is old."""
    return 0.0 if idle_bin == 0 else float(1 << (idle_bin - 1))


@dataclass(frozen=True, slots=True)
class Curve:
    """The density of returns for each idle bin, and where between its ends the curve turns from falling to rising.

    `valleys_seconds` are idle times: up to each the curve has been falling, from there on it rises.
    """

    densities: tuple[float, ...]
    valleys_seconds: tuple[float, ...]


class _Counts:
    """Arrivals and returns of one group, decayed. Starts from the prior."""

    __slots__ = ("arrivals", "curve", "returns")

    def __init__(self, group: Group) -> None:
        chance = min(_prior_probability(group), 0.95)
        self.arrivals = PRIOR_ARRIVALS
        self.returns = [PRIOR_ARRIVALS * chance * share for share in IDLE_SHARE]
        self.curve: Curve | None = None

    def forget_half(self) -> None:
        self.arrivals /= 2
        self.returns = [count / 2 for count in self.returns]


class ReturnRates:
    """For each group of checkpoints, how many come back and after how long. Bounded, deterministic, no clock.

    Mutable: only the engine loop's task may touch it. There is no need to tell it of a checkpoint that never came
    back: that is an arrival without a return. Returns to checkpoints that were evicted count as well, or the cache
    would only ever learn about what it keeps.
    """

    def __init__(self) -> None:
        self._counts: dict[Group, _Counts] = {}

    def arrived(self, entry: Returning) -> None:
        """A checkpoint begins to wait for its next use: it is published, or would be were it not there already."""
        self._arrive(group_of(entry))

    def returned(self, entry: Returning, idle_seconds: float) -> None:
        """A request is resumed from it, or would be had it not been evicted. Tell before `uses` and `turns` change.

        Of a conversation that goes on, tell it of each private checkpoint on the path that was not superseded before,
        not of the deepest alone: a turn closure under an endpoint would else pass for one that nobody comes back to.
        Of shared ones, only of the deepest that served or would have.

        A shared prefix waits for its next use from then on. A private checkpoint does not: the conversation goes on
        in a newer one.
        """
        group = group_of(entry)
        counts = self._counts_of(group)
        counts.returns[idle_bin(idle_seconds)] += 1
        counts.curve = None
        if group.kind.is_shared:
            step = min(_octave(entry.uses + 2), len(SHARED_PROBABILITY) - 1)
            self._arrive(Group(group.kind, step, 0))

    def curve(self, group: Group) -> Curve:
        """What is known of a group, for ranking."""
        counts = self._counts_of(group)
        if counts.curve is None:
            counts.curve = _curve(counts.arrivals, counts.returns)
        return counts.curve

    def density(self, group: Group, idle_seconds: float) -> float:
        """Returns to be had for each second that a slot is held on, from this idle time, in returns per second.

        It is the best ratio of expected returns to expected time over all times to give up at: the Gittins index of
        a job that may end (Gittins 1979; as hit density in Beckmann et al., LHD, NSDI'18).
        """
        return self.curve(group).densities[idle_bin(idle_seconds)]

    def _arrive(self, group: Group) -> None:
        counts = self._counts_of(group)
        counts.arrivals += 1
        counts.curve = None
        if counts.arrivals > MEMORY_ARRIVALS:
            counts.forget_half()

    def _counts_of(self, group: Group) -> _Counts:
        counts = self._counts.get(group)
        if counts is None:
            counts = self._counts[group] = _Counts(group)
        return counts


def _octave(number: int) -> int:
    """floor(log2(number)), and 0 below 1."""
    return max(number, 1).bit_length() - 1


def _prior_probability(group: Group) -> float:
    if group.kind.is_shared:
        return SHARED_PROBABILITY[group.step]
    return RETURN_PROBABILITY[group.step] * LENGTH_FACTOR[group.length] * KIND_FACTOR.get(group.kind, 1.0)


def _curve(arrivals: float, returns: list[float]) -> Curve:
    """Densities by bin: the largest of (returns in bins b..e) / (seconds waited in bins b..e) over all e."""
    waiting = max(arrivals, 1.02 * sum(returns))
    seconds: list[float] = []
    for number, count in enumerate(returns):
        seconds.append((waiting - count / 2) * (bin_start_seconds(number + 1) - bin_start_seconds(number)))
        waiting -= count
    densities = []
    for first in range(IDLE_BINS):
        best = gain = cost = 0.0
        for number in range(first, IDLE_BINS):
            gain += returns[number]
            cost += seconds[number]
            best = max(best, gain / cost)
        densities.append(best)
    return Curve(tuple(densities), tuple(_valleys(densities)))


def _valleys(densities: list[float]) -> list[float]:
    valleys: list[float] = []
    is_falling = False
    for number in range(1, IDLE_BINS):
        if densities[number] < densities[number - 1]:
            is_falling = True
        elif densities[number] > densities[number - 1] and is_falling:
            valleys.append(bin_start_seconds(number))
            is_falling = False
    return valleys
