"""What one request says about reuse: how much of what was to be expected of it was lost, and how much that weighs."""

from __future__ import annotations

from dataclasses import dataclass

from cache import ROOT_PATH, CheckpointKind, ReuseReport

_SHARED_PATHS = frozenset(kind.value for kind in CheckpointKind if kind.is_shared)
_SHARED_HIT_WEIGHT = 0.1
"""A hit of a prefix that many share says little about conversations: it must not outweigh those that are lost."""
_USUAL_SHARE = 0.5
"""A request with half of the usual tokens or more weighs as much as any other."""
_LEARNING_RATE = 0.1
_NOTICEABLE_SHARE = 0.05
"""Less than this share lost is a matter of where checkpoints stand."""


@dataclass(frozen=True, slots=True)
class Chance:
    """A request that could have reused something, or did."""

    loss: float
    """1: all that was to be expected is lost. 0: none. Below 0: more was reused than was to be expected."""
    weight: float
    """0 to 1."""
    expected_tokens: int
    lost_tokens: int
    reason: str
    """Why what was to be expected is not there; empty where nothing was lost."""
    fault_tokens: int
    """Of the lost ones those of which no rule about what gives way can be the cause: nothing needed their room."""
    fault_weight: float
    """0 unless it is sure to be a fault; then 1, or less for a few tokens. How much of a long prompt was found all the
    same is not asked: where nothing new is kept, the first requests lose only what was said last."""
    is_root: bool
    owed_loss: float = 0.0
    """As `loss`, without what was lost in a bet that was good when it was made."""

    @property
    def is_loss(self) -> bool:
        """Whether most of it was lost."""
        return self.loss > 0.5

    @property
    def is_noticeable(self) -> bool:
        """Whether some of it was lost, if only what was said last."""
        return self.loss >= _NOTICEABLE_SHARE

    @property
    def is_owed(self) -> bool:
        """Whether some was lost that no good bet took."""
        return self.owed_loss >= _NOTICEABLE_SHARE


class ChanceScale:
    """Knows how many tokens are usual. Mutable."""

    def __init__(self) -> None:
        self._usual_tokens: float | None = None

    def weigh(self, report: ReuseReport) -> Chance | None:
        """None for a request that had nothing to lose, and reused nothing."""
        expected, cached = report.expected_tokens, report.cached_tokens
        at_stake = max(expected, cached)
        if at_stake <= 0:
            return None
        is_shared = report.path in _SHARED_PATHS
        if expected > cached:
            # The system prompt that was found does not make up for the conversation that was not.
            loss = 1.0 if is_shared else (expected - cached) / expected
        else:
            loss = (expected - cached) / cached
        lost = max(expected - cached, 0)
        usual = self._usual_tokens or at_stake
        weight = self._weight(lost if is_shared and lost else at_stake)
        if is_shared and expected <= cached:
            weight *= _SHARED_HIT_WEIGHT
        reason = next(iter(report.lost), "") if lost else ""
        fault = report.fault_tokens
        fault_weight = min(1.0, fault / (_NOTICEABLE_SHARE * usual)) if loss >= _NOTICEABLE_SHARE else 0.0
        owed = loss * max(lost - report.bet_tokens, fault) / lost if lost else loss
        return Chance(loss, weight, expected, lost, reason, fault, fault_weight, report.path == ROOT_PATH, owed)

    def _weight(self, tokens: int) -> float:
        usual = self._usual_tokens
        if usual is None:
            self._usual_tokens = float(tokens)
            return 1.0
        weight = min(1.0, tokens / (_USUAL_SHARE * usual)) if usual else 1.0
        self._usual_tokens = usual + _LEARNING_RATE * (tokens - usual)
        return weight
