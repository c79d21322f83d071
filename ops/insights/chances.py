"""What one request says about reuse: how much of what was to be expected of it was lost, and how much that weighs."""

from __future__ import annotations

from dataclasses import dataclass

from cache import ROOT_PATH, CheckpointKind, LossReason, ReuseReport
from engine.snapshot import EngineSnapshot

_SHARED_PATHS = frozenset(kind.value for kind in CheckpointKind if kind.is_shared)
_SHARED_HIT_WEIGHT = 0.1
"""A hit of a prefix that many share says little about conversations: it must not outweigh those that are lost."""
_USUAL_SHARE = 0.5
"""A request with half of the usual tokens or more weighs as much as any other."""
_LEARNING_RATE = 0.1
_NOTICEABLE_SHARE = 0.05
"""Less than this share lost is a matter of where checkpoints stand."""
_ROOM_SHARE = 1 / 8
_GAVE_WAY = frozenset({LossReason.EVICTED_STATE.value, LossReason.EVICTED_KV.value})
"""What a cache that is full does all the time."""


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
    is_sure: bool
    """Whether no rule about what gives way can be the cause: it is lost for another reason, or while there is room."""
    fault_weight: float
    """0 unless it is sure to be a fault; then 1, or less for a few tokens. How much of a long prompt was found all the
    same is not asked: where nothing new is kept, the first requests lose only what was said last."""
    is_root: bool

    @property
    def is_loss(self) -> bool:
        """Whether most of it was lost."""
        return self.loss > 0.5

    @property
    def is_noticeable(self) -> bool:
        """Whether some of it was lost, if only what was said last."""
        return self.loss >= _NOTICEABLE_SHARE


@dataclass(frozen=True, slots=True)
class Room:
    """Whether pools have room at a moment: then nothing needs to give way. KV pages are not asked: those of requests
    that run come and go by the hundred, so that what is free now may well not have been."""

    for_states: bool = False
    is_crowded: bool = False
    """Frontiers were not kept of late because running requests had every slot."""
    is_host_full: bool = False
    """Room for one state image at most."""

    @staticmethod
    def of(snapshot: EngineSnapshot) -> Room:
        slots, pages, host = snapshot.state_slots, snapshot.kv_pages, snapshot.host_state_slots
        has_pages = pages.free > pages.capacity * _ROOM_SHARE
        return Room(
            for_states=has_pages and slots.free > max(1, slots.capacity * _ROOM_SHARE),
            is_host_full=host.capacity > 0 and host.free <= 1,
        )

    def excuses(self, reason: str) -> bool:
        """Whether something may be lost for this reason although all is well."""
        if reason == LossReason.PUBLISH_SKIPPED:
            return self.is_crowded
        return reason in _GAVE_WAY and not (self.for_states and reason == LossReason.EVICTED_STATE)


class ChanceScale:
    """Knows how many tokens are usual. Mutable."""

    def __init__(self) -> None:
        self._usual_tokens: float | None = None

    def weigh(self, report: ReuseReport, room: Room) -> Chance | None:
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
        # Of one conversation what is newest outlives what is older: an older turn that is there instead is no choice.
        is_outlived = reason == LossReason.EVICTED_STATE and not is_shared and report.path != ROOT_PATH
        is_sure = bool(lost) and (is_outlived or not room.excuses(reason))
        fault_weight = min(1.0, lost / (_NOTICEABLE_SHARE * usual)) if is_sure and loss >= _NOTICEABLE_SHARE else 0.0
        return Chance(loss, weight, expected, lost, reason, is_sure, fault_weight, report.path == ROOT_PATH)

    def _weight(self, tokens: int) -> float:
        usual = self._usual_tokens
        if usual is None:
            self._usual_tokens = float(tokens)
            return 1.0
        weight = min(1.0, tokens / (_USUAL_SHARE * usual)) if usual else 1.0
        self._usual_tokens = usual + _LEARNING_RATE * (tokens - usual)
        return weight
