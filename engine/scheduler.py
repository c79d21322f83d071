"""Who computes what in the next step: admission, growth, suspension, and every exit.

First come, first served. A sequence that holds pages has always arrived before every one that waits, so the oldest can
always go on by suspending younger ones, and every request ends. Pure logic: no tensors, no clock, no input or output.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from cache import Holder, Pool, PoolExhaustedError, UnitState
from engine.errors import ContextLengthExceededError, RequestError, ServerOverloadedError
from engine.plan import Segment, StepPlan, StepResult
from engine.request import FinishReason, GenerationRequest
from engine.sequence import SequenceRecord, SequenceState


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """What the scheduler works within; tokens unless the name says otherwise."""

    max_concurrency: int
    max_pending_requests: int
    pending_timeout_seconds: float
    max_context_tokens: int
    prefill_chunk: int
    page_size: int
    output_step_tokens: int = 64
    """Room for output that is reserved ahead, at admission and at each growth."""

    def pages_of(self, tokens: int) -> int:
        """Pages that hold this many tokens."""
        return -(-tokens // self.page_size)


@dataclass(frozen=True, slots=True)
class TokenOutcome:
    """One picked token. The last one of a request has a `finish_reason`; with STOP it is the stop token itself."""

    sequence: SequenceRecord
    token_id: int
    finish_reason: FinishReason | None


class Scheduler:
    """Owns every sequence and, through their leases, the two pools. Mutable: only the engine loop's task may touch
    it."""

    def __init__(
        self, limits: SchedulerLimits, kv_pages: Pool, state_slots: Pool, end_token_ids: Iterable[int] = ()
    ) -> None:
        """Raises ValueError for pools in which one full context, or the running requests, could not fit."""
        if limits.pages_of(limits.max_context_tokens) > kv_pages.capacity:
            raise ValueError(
                f"max_context_tokens {limits.max_context_tokens} needs {limits.pages_of(limits.max_context_tokens)} "
                f"pages but the pool has {kv_pages.capacity}"
            )
        if limits.max_concurrency > state_slots.capacity:
            raise ValueError(f"{limits.max_concurrency} running requests need more than {state_slots.capacity} slots")
        self.limits = limits
        self.kv_pages = kv_pages
        self.state_slots = state_slots
        self.suspensions_total = 0
        self._end_token_ids = frozenset(end_token_ids)
        self._alive: dict[str, SequenceRecord] = {}
        self._waiting: deque[SequenceRecord] = deque()
        self._running: list[SequenceRecord] = []
        self._arrivals = 0

    @property
    def running(self) -> tuple[SequenceRecord, ...]:
        """Sequences that hold pages and a slot, oldest first."""
        return tuple(self._running)

    @property
    def waiting(self) -> tuple[SequenceRecord, ...]:
        """Sequences that hold nothing, in the order in which they will be admitted."""
        return tuple(self._waiting)

    def validate(self, request: GenerationRequest, also_waiting: int = 0) -> None:
        """Refuse at once what can never be served, or not now. `also_waiting` requests are on their way here.

        Raises ContextLengthExceededError, ServerOverloadedError, or RequestError for an empty prompt.
        """
        prompt_tokens = len(request.prompt_token_ids)
        if prompt_tokens == 0:
            raise RequestError("the prompt has no tokens; send at least one", param="prompt")
        if request.sampling.max_tokens < 1:
            raise RequestError(
                f"max_tokens is {request.sampling.max_tokens}; ask for at least 1 token", param="max_tokens"
            )
        if prompt_tokens >= self.limits.max_context_tokens:
            raise ContextLengthExceededError(
                f"the prompt has {prompt_tokens} tokens; the context holds {self.limits.max_context_tokens}, of which "
                f"at least 1 is for the answer; shorten the prompt to {self.limits.max_context_tokens - 1} tokens",
                param="prompt",
            )
        if self._num_pending + also_waiting >= self._pending_allowance:
            raise ServerOverloadedError(
                f"{self._num_pending + also_waiting} requests are waiting, the queue holds "
                f"{self.limits.max_pending_requests}; try again later"
            )

    def submit(self, request: GenerationRequest, now: float) -> None:
        """Queue a validated request; its seed is set. Raises ValueError for a request id that is alive."""
        if request.request_id in self._alive:
            raise ValueError(f"request id {request.request_id!r} is alive already")
        self._arrivals += 1
        total = len(request.prompt_token_ids) + request.sampling.max_tokens
        sequence = SequenceRecord(
            request,
            arrival=self._arrivals,
            submitted_at=now,
            max_total_tokens=min(total, self.limits.max_context_tokens),
            stop_token_ids=self._end_token_ids.union(request.sampling.stop_token_ids),
        )
        self._alive[sequence.request_id] = sequence
        self._waiting.append(sequence)

    def plan(self, now: float) -> StepPlan | None:
        """The next step, after room was made for it and new requests were let in; None when there is nothing to do.

        Not to be called while a step runs.
        """
        for sequence in self.running:
            if sequence.state is SequenceState.DECODING:
                self._make_room_for_next_token(sequence)
        self._admit(now)
        segments = [*self._decode_segments(), *self._prefill_segments()]
        if not segments:
            return None
        segments.sort(key=lambda segment: not segment.is_decode)
        return StepPlan(tuple(segments))

    def apply(self, plan: StepPlan, result: StepResult, now: float) -> list[TokenOutcome]:
        """Take in what a step picked; sequences that end have given everything back when this returns."""
        outcomes: list[TokenOutcome] = []
        for segment in plan.segments:
            sequence = self._alive[segment.request_id]
            sequence.computed_tokens = segment.end
            if not segment.is_sampled:
                continue
            token_id = result.token_ids[segment.request_id]
            sequence.append(token_id, now)
            reason = _finish_reason(sequence, token_id)
            if reason is not None:
                self._remove(sequence)
            outcomes.append(TokenOutcome(sequence, token_id, reason))
        return outcomes

    def cancel(self, request_id: str) -> SequenceRecord | None:
        """End a request wherever it is, unless it has ended. Not to be called while a step runs."""
        sequence = self._alive.get(request_id)
        if sequence is not None:
            self._remove(sequence)
        return sequence

    def expire(self, now: float) -> list[SequenceRecord]:
        """End the requests that have waited for their first step longer than the limit. Called after `plan`."""
        limit = self.limits.pending_timeout_seconds
        expired = [sequence for sequence in self._pending() if now - sequence.submitted_at >= limit]
        for sequence in expired:
            self._remove(sequence)
        return expired

    def abort(self, request_ids: Iterable[str]) -> list[SequenceRecord]:
        """End several requests, e.g. those of a step that failed."""
        return [sequence for request_id in tuple(request_ids) if (sequence := self.cancel(request_id)) is not None]

    def check(self) -> list[str]:
        """Compare pools, leases and sequences from scratch; one line per violation, empty when sound."""
        violations = [*self.kv_pages.check(), *self.state_slots.check()]
        for sequence in self._running:
            pages, slot = sequence.leases
            if len(slot) != 1 or sequence.page_ids.tolist() != list(pages.units):
                violations.append(f"request {sequence.request_id!r}: its block table differs from its lease")
            if len(pages) < self.limits.pages_of(sequence.computed_tokens):
                violations.append(f"request {sequence.request_id!r}: computed tokens lie outside its pages")
        for sequence in self._waiting:
            if sequence.leases:
                violations.append(f"request {sequence.request_id!r} waits but holds a lease")
        order = [sequence.arrival for sequence in (*self._running, *self._waiting)]
        if order != sorted(order):
            violations.append(f"arrivals out of order: {order}")
        if self._alive.keys() != {sequence.request_id for sequence in (*self._running, *self._waiting)}:
            violations.append("a request that is alive neither runs nor waits")
        held = sum(len(sequence.leases[0]) for sequence in self._running)
        pinned = self.kv_pages.counts().pinned
        if held != pinned:
            violations.append(f"{pinned} pages are pinned but the running requests hold {held}")
        return violations

    def _pending(self) -> list[SequenceRecord]:
        return [sequence for sequence in self._waiting if sequence.state is SequenceState.WAITING]

    @property
    def _num_pending(self) -> int:
        return len(self._pending())

    @property
    def _pending_allowance(self) -> int:
        """Requests beyond those that run already which may be here: free seats count while nobody waits for room."""
        free_seats = 0 if self._waiting else self.limits.max_concurrency - len(self._running)
        return self.limits.max_pending_requests + free_seats

    def _remove(self, sequence: SequenceRecord) -> None:
        (self._running if sequence.is_admitted else self._waiting).remove(sequence)
        del self._alive[sequence.request_id]
        sequence.finish()

    def _make_room_for_next_token(self, sequence: SequenceRecord) -> None:
        """Grow by a step of output, or at least by what the next token needs, at the cost of the youngest."""
        while sequence.is_admitted:
            missing = self.limits.pages_of(len(sequence.token_ids)) - len(sequence.page_ids)
            if missing <= 0:
                return
            wanted = self._pages_with_output_step(sequence) - len(sequence.page_ids)
            if missing <= self.kv_pages.free:
                sequence.grow(min(wanted, self.kv_pages.free))
                return
            self._suspend(self._running[-1])

    def _suspend(self, sequence: SequenceRecord) -> None:
        self._running.remove(sequence)
        sequence.suspend()
        self._waiting.appendleft(sequence)
        self.suspensions_total += 1

    def _admit(self, now: float) -> None:
        while self._waiting and len(self._running) < self.limits.max_concurrency:
            sequence = self._waiting[0]
            holder = Holder(UnitState.PINNED, sequence.request_id)
            try:
                pages = self.kv_pages.lease(holder, self._pages_with_output_step(sequence))
            except PoolExhaustedError:
                return
            try:
                slot = self.state_slots.lease(holder, 1)
            except PoolExhaustedError:
                pages.close()
                return
            self._waiting.popleft()
            sequence.admit(pages, slot, now)
            self._running.append(sequence)

    def _pages_with_output_step(self, sequence: SequenceRecord) -> int:
        ahead = len(sequence.token_ids) + self.limits.output_step_tokens
        return self.limits.pages_of(min(ahead, sequence.max_total_tokens))

    def _decode_segments(self) -> list[Segment]:
        return [
            self._segment(sequence, len(sequence.token_ids))
            for sequence in self._running
            if sequence.state is SequenceState.DECODING
        ]

    def _prefill_segments(self) -> list[Segment]:
        """Oldest first, each up to its next multiple of the chunk, as long as a step's budget of one chunk lasts."""
        budget = chunk = self.limits.prefill_chunk
        segments: list[Segment] = []
        for sequence in self._running:
            if sequence.state is not SequenceState.PREFILLING:
                continue
            end = min((sequence.computed_tokens // chunk + 1) * chunk, len(sequence.token_ids))
            budget -= end - sequence.computed_tokens
            if budget < 0:
                break
            segments.append(self._segment(sequence, end))
        return segments

    def _segment(self, sequence: SequenceRecord, end: int) -> Segment:
        start = sequence.computed_tokens
        return Segment(
            request_id=sequence.request_id,
            token_ids=tuple(sequence.token_ids[start:end]),
            start=start,
            page_ids=sequence.page_ids[: self.limits.pages_of(end)],
            state_slot=sequence.state_slot,
            is_sampled=end == len(sequence.token_ids),
            sampling=sequence.request.sampling,
        )


def _finish_reason(sequence: SequenceRecord, token_id: int) -> FinishReason | None:
    if token_id in sequence.stop_token_ids:
        return FinishReason.STOP
    if len(sequence.token_ids) >= sequence.max_total_tokens:
        return FinishReason.LENGTH
    return None
