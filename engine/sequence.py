"""A request as the scheduler sees it: its tokens, how far they are computed, and the leases it holds."""

from __future__ import annotations

from enum import StrEnum

import numpy as np
import numpy.typing as npt

from cache import Lease
from engine.request import GenerationRequest


class SequenceState(StrEnum):
    """Where a sequence is in its life."""

    WAITING = "waiting"
    """Holds nothing; not yet admitted."""
    PREFILLING = "prefilling"
    DECODING = "decoding"
    SUSPENDED = "suspended"
    """Holds nothing; was admitted once, and is computed again from its tokens before anything new."""
    FINISHED = "finished"


_TRANSITIONS = {
    SequenceState.WAITING: {SequenceState.PREFILLING, SequenceState.FINISHED},
    SequenceState.PREFILLING: {SequenceState.DECODING, SequenceState.SUSPENDED, SequenceState.FINISHED},
    SequenceState.DECODING: {SequenceState.SUSPENDED, SequenceState.FINISHED},
    SequenceState.SUSPENDED: {SequenceState.PREFILLING, SequenceState.FINISHED},
    SequenceState.FINISHED: set[SequenceState](),
}


class SequenceRecord:
    """One request's progress. Mutable: only the scheduler, on the engine loop's task, may change it.

    Times are seconds on the monotonic clock; None until reached.
    """

    __slots__ = (
        "_pages",
        "_slot",
        "_state",
        "admitted_at",
        "arrival",
        "computed_tokens",
        "first_token_at",
        "last_token_at",
        "max_total_tokens",
        "page_ids",
        "request",
        "stop_token_ids",
        "submitted_at",
        "token_ids",
    )

    def __init__(
        self,
        request: GenerationRequest,
        *,
        arrival: int,
        submitted_at: float,
        max_total_tokens: int,
        stop_token_ids: frozenset[int],
    ) -> None:
        self.request = request
        self.arrival = arrival
        self.submitted_at = submitted_at
        self.max_total_tokens = max_total_tokens
        """Prompt and output together."""
        self.stop_token_ids = stop_token_ids
        self.admitted_at: float | None = None
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None
        self.token_ids = list(request.prompt_token_ids)
        """The prompt and, after it, the output so far."""
        self.computed_tokens = 0
        """How many of them are in the pages and in the state."""
        self.page_ids: npt.NDArray[np.int32] = np.empty(0, np.int32)
        self._state = SequenceState.WAITING
        self._pages: Lease | None = None
        self._slot: Lease | None = None

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def state(self) -> SequenceState:
        return self._state

    @property
    def is_admitted(self) -> bool:
        """Whether it holds pages and a slot."""
        return self._pages is not None

    @property
    def output_tokens(self) -> int:
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    @property
    def state_slot(self) -> int:
        if self._slot is None:
            raise ValueError(f"request {self.request_id!r} is {self._state} and has no state slot")
        return self._slot.units[0]

    @property
    def leases(self) -> tuple[Lease, ...]:
        """Of pages and of the slot; empty when it holds nothing."""
        return tuple(lease for lease in (self._pages, self._slot) if lease is not None)

    def admit(self, pages: Lease, slot: Lease, now: float) -> None:
        """Take over two leases and start (or start again) at the first token."""
        self._move_to(SequenceState.PREFILLING)
        self._pages, self._slot = pages, slot
        self.computed_tokens = 0
        self.admitted_at = now if self.admitted_at is None else self.admitted_at
        self._refresh_page_ids()

    def grow(self, pages: int) -> None:
        """Take `pages` more. Raises PoolExhaustedError and then changes nothing."""
        if self._pages is None:
            raise ValueError(f"request {self.request_id!r} is {self._state} and cannot grow")
        self._pages.grow(pages)
        self._refresh_page_ids()

    def append(self, token_id: int, now: float) -> None:
        """Add a token that was picked."""
        if self._state is SequenceState.PREFILLING:
            self._move_to(SequenceState.DECODING)
        self.token_ids.append(token_id)
        self.first_token_at = now if self.first_token_at is None else self.first_token_at
        self.last_token_at = now

    def suspend(self) -> None:
        """Give everything back, keep the tokens."""
        self._move_to(SequenceState.SUSPENDED)
        self._release()

    def finish(self) -> None:
        """Give everything back for good: the one exit, whatever the reason."""
        self._move_to(SequenceState.FINISHED)
        self._release()

    def _release(self) -> None:
        for lease in self.leases:
            lease.close()
        self._pages = self._slot = None
        self.computed_tokens = 0
        self._refresh_page_ids()

    def _refresh_page_ids(self) -> None:
        self.page_ids = np.array(self._pages.units if self._pages is not None else (), np.int32)
        self.page_ids.flags.writeable = False

    def _move_to(self, state: SequenceState) -> None:
        if state not in _TRANSITIONS[self._state]:
            raise ValueError(f"request {self.request_id!r} cannot go from {self._state} to {state}")
        self._state = state
