"""A request as the scheduler sees it: its tokens, how far they are computed, and the lease it holds."""

from __future__ import annotations

from enum import StrEnum

import numpy as np
import numpy.typing as npt

from cache import RequestLease, ReuseReport
from engine.logits import LogitEdits
from engine.phases import Phase, PhaseClock
from engine.request import FinishReason, GenerationRequest


class SequenceState(StrEnum):
    """Where a sequence is in its life."""

    WAITING = "waiting"
    """Holds nothing; not yet admitted."""
    RESTORING = "restoring"
    """Holds everything, but what it reuses is still on its way from host memory."""
    PREFILLING = "prefilling"
    DECODING = "decoding"
    SUSPENDED = "suspended"
    """Holds nothing; was admitted once, and goes on before anything new, from whatever is still remembered of it or,
    when that could not be restored, from its first token."""
    FINISHED = "finished"


_TRANSITIONS = {
    SequenceState.WAITING: {SequenceState.RESTORING, SequenceState.PREFILLING, SequenceState.FINISHED},
    SequenceState.RESTORING: {SequenceState.PREFILLING, SequenceState.SUSPENDED, SequenceState.FINISHED},
    SequenceState.PREFILLING: {SequenceState.DECODING, SequenceState.SUSPENDED, SequenceState.FINISHED},
    SequenceState.DECODING: {SequenceState.SUSPENDED, SequenceState.FINISHED},
    SequenceState.SUSPENDED: {SequenceState.RESTORING, SequenceState.PREFILLING, SequenceState.FINISHED},
    SequenceState.FINISHED: set[SequenceState](),
}

_PHASES = {
    SequenceState.WAITING: Phase.QUEUE,
    SequenceState.RESTORING: Phase.RESTORE,
    SequenceState.PREFILLING: Phase.PREFILL,
    SequenceState.DECODING: Phase.DECODE,
    SequenceState.SUSPENDED: Phase.RESTORE,
}
"""What its time is spent on, unless it was preempted: else it is suspended only where a restore failed."""


class SequenceRecord:
    """One request's progress. Mutable: only the scheduler, on the engine loop's task, may change it.

    Times are seconds on the monotonic clock; None until reached.
    """

    __slots__ = (
        "_state",
        "admitted_at",
        "arrival",
        "clock",
        "computed_tokens",
        "edits",
        "first_token_at",
        "has_lost_restore",
        "is_held_back",
        "is_preempted",
        "lacks_room_since",
        "lease",
        "max_total_tokens",
        "page_ids",
        "preempted_at_tokens",
        "preemptions",
        "recomputed_tokens",
        "request",
        "reuse",
        "stop_token_ids",
        "submitted_at",
        "times_passed",
        "token_ids",
        "tried_at",
        "turn",
    )

    def __init__(
        self,
        request: GenerationRequest,
        *,
        arrival: int,
        turn: int,
        submitted_at: float,
        max_total_tokens: int,
        stop_token_ids: frozenset[int],
    ) -> None:
        self.request = request
        self.arrival = arrival
        self.turn = turn
        """When it is to be let in, among those that wait; see engine.turns."""
        self.submitted_at = submitted_at
        self.max_total_tokens = max_total_tokens
        """Prompt and output together."""
        self.stop_token_ids = stop_token_ids
        self.edits = LogitEdits.of(request, stop_token_ids)
        """What is done to its logits; None for most requests."""
        self.admitted_at: float | None = None
        self.first_token_at: float | None = None
        self.token_ids = list(request.prompt_token_ids)
        """The prompt and, after it, the output so far."""
        self.computed_tokens = 0
        """How many of them are in the pages and in the state."""
        self.page_ids: npt.NDArray[np.int32] = np.empty(0, np.int32)
        self.lease: RequestLease | None = None
        self.reuse: ReuseReport | None = None
        """Of its first start; what a suspended request finds again of its own is no reuse."""
        self.clock = PhaseClock(submitted_at)
        self.preemptions = 0
        """How often it was set aside while it ran, because others needed its room."""
        self.is_preempted = False
        """From then on until it is where it was."""
        self.preempted_at_tokens = 0
        """How many were computed when it was last set aside."""
        self.recomputed_tokens = 0
        """Those that were computed a second time because of that."""
        self.has_lost_restore = False
        """What it was to reuse could not be copied: it is to start from its first token."""
        self.is_held_back = False
        """Waits for what another is about to publish, not for room."""
        self.lacks_room_since: float | None = None
        """When it was first found that it fits nowhere, while it waits to be let in."""
        self.times_passed = 0
        """How many were let in since, though their turn was after its own."""
        self.tried_at = -1
        """The scheduler's count of changes when it was last found that it has to wait."""
        self._state = SequenceState.WAITING

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def state(self) -> SequenceState:
        return self._state

    @property
    def is_admitted(self) -> bool:
        """Whether it holds pages and a slot."""
        return self.lease is not None

    @property
    def phase(self) -> Phase:
        """What its time is spent on at this moment. It does not begin its prompt anew when it is set aside later."""
        if self.is_preempted:
            return Phase.PREEMPTED
        return _PHASES[self._state] if self.first_token_at is None else Phase.DECODE

    @property
    def output_tokens(self) -> int:
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    @property
    def held(self) -> RequestLease:
        """Its lease. Raises ValueError when it holds nothing."""
        if self.lease is None:
            raise ValueError(f"request {self.request_id!r} is {self._state} and holds nothing")
        return self.lease

    def admit(self, lease: RequestLease, now: float) -> None:
        """Take over a lease, and start, or start again, after what it reuses, once that is there."""
        self._move_to(SequenceState.RESTORING if lease.is_restoring else SequenceState.PREFILLING, now)
        self.lease = lease
        self.is_held_back = False
        self.has_lost_restore = False
        self.computed_tokens = lease.cached_tokens
        self.admitted_at = now if self.admitted_at is None else self.admitted_at
        self.refresh_page_ids()
        if not lease.is_restoring:
            self._begin()

    def begin(self, now: float) -> None:
        """What it restored is there."""
        self._move_to(SequenceState.PREFILLING, now)
        self._begin()

    def _begin(self) -> None:
        self.is_preempted = self.is_preempted and self.computed_tokens < self.preempted_at_tokens
        if self.reuse is None:
            self.reuse = self.held.report

    def refresh_page_ids(self) -> None:
        """Its lease has grown."""
        self.page_ids = np.array(self.lease.page_units if self.lease is not None else (), np.int32)
        self.page_ids.flags.writeable = False

    def compute(self, end: int) -> int:
        """A step has come to this position; returns how many of its tokens it had computed before it was set aside."""
        again = max(0, min(end, self.preempted_at_tokens) - self.computed_tokens) if self.is_preempted else 0
        self.recomputed_tokens += again
        self.computed_tokens = end
        self.is_preempted = self.is_preempted and end < self.preempted_at_tokens
        return again

    def append(self, token_id: int, now: float) -> None:
        """Add a token that was picked."""
        if self._state is SequenceState.PREFILLING:
            self._move_to(SequenceState.DECODING, now)
        self.token_ids.append(token_id)
        if self.edits is not None:
            self.edits.add(token_id)
        self.first_token_at = now if self.first_token_at is None else self.first_token_at

    def end_at(self, token_id: int) -> FinishReason | None:
        """Why this token, just picked, is the last; None where it is not."""
        if token_id in self.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.token_ids) >= self.max_total_tokens else None

    def suspend(self, now: float) -> None:
        """Its lease was closed for the sake of others; keep the tokens."""
        if self._state is not SequenceState.RESTORING:
            self.preempted_at_tokens = max(self.preempted_at_tokens, self.computed_tokens)
        self._leave(SequenceState.SUSPENDED, now)
        self.preemptions += 1
        self.is_preempted = True

    def lose_restore(self, now: float) -> None:
        """The copies for its lease failed, and it was closed."""
        self._leave(SequenceState.SUSPENDED, now)
        self.has_lost_restore = True

    def finish(self, now: float) -> None:
        """Its lease, if it had one, was closed for good: the one exit, whatever the reason."""
        self._leave(SequenceState.FINISHED, now)

    def _leave(self, state: SequenceState, now: float) -> None:
        self._move_to(state, now)
        self.lease = None
        self.computed_tokens = 0
        self.refresh_page_ids()

    def _move_to(self, state: SequenceState, now: float) -> None:
        if state not in _TRANSITIONS[self._state]:
            raise ValueError(f"request {self.request_id!r} cannot go from {self._state} to {state}")
        self.clock.charge(self.phase, now)
        self._state = state


def order(sequence: SequenceRecord) -> tuple[bool, int, int]:
    """The order of each line: those that were suspended, then those that have never run, each by its turn."""
    return sequence.state is SequenceState.WAITING, sequence.turn, sequence.arrival
