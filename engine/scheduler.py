"""Who computes what in the next step: admission, growth, suspension, and every exit.

Clients take turns, and each client's requests come in order. Others may pass a request that waits for a prefix that
another is about to publish, and for some time one that lacks room. The first that runs can always go on by suspending
those behind it, so every request ends. Pure logic: no tensors, no clock, no input or output.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass

from cache import CaptureTicket, ContextCache, Copy, Match, check
from engine.charging import charge_step
from engine.copies import CopyJobs, Landed, Transfers
from engine.frontiers import FrontierRules, next_cut, prompt_frontiers, settle_anchors, with_places_on_the_way
from engine.limits import SchedulerLimits, refuse_unservable
from engine.packing import Prefill, share_step
from engine.plan import Segment, StepPlan, StepResult
from engine.request import FinishReason, GenerationRequest, TokenLogprob
from engine.sequence import SequenceRecord, SequenceState, order
from engine.sequence_check import check_sequences
from engine.turns import Turns, may_be_passed, refuse_beyond_share


@dataclass(frozen=True, slots=True)
class TokenOutcome:
    """One picked token. The last one of a request has a `finish_reason`; with STOP it is the stop token itself."""

    sequence: SequenceRecord
    token_id: int
    finish_reason: FinishReason | None
    logprob: TokenLogprob | None = None


class Scheduler:
    """Owns every sequence and, through their leases, the context cache. Mutable: only the engine loop's task may touch
    it."""

    def __init__(
        self,
        limits: SchedulerLimits,
        cache: ContextCache,
        end_token_ids: Iterable[int] = (),
        transfers: Transfers | None = None,
    ) -> None:
        """`transfers` are those of a former scheduler, to go on counting. Raises ValueError for a cache in which one
        full context, or the running requests, could not fit."""
        if not cache.fits_alone(limits.max_context_tokens):
            raise ValueError(
                f"max_context_tokens {limits.max_context_tokens} needs "
                f"{cache.options.pages_of(limits.max_context_tokens)} pages but the pool has {cache.pages.capacity}"
            )
        if cache.options.has_state and cache.slots.capacity < limits.max_concurrency:
            raise ValueError(f"{limits.max_concurrency} running requests need more than {cache.slots.capacity} slots")
        self.limits = limits
        self.cache = cache
        self._rules = FrontierRules.of(cache.options, limits.max_concurrency, limits.prefill_chunk)
        self.copies = CopyJobs(cache, transfers)
        self.suspensions_total = 0
        self.recomputed_tokens_total = 0
        self._end_token_ids = frozenset(end_token_ids)
        self._alive: dict[str, SequenceRecord] = {}
        self._waiting: list[SequenceRecord] = []
        self._running: list[SequenceRecord] = []
        self._resuming: list[SequenceRecord] = []
        self._captures: list[CaptureTicket] = []
        self._turns = Turns()
        self._arrivals = 0
        self._changes = 0
        """Exits, captures and copies: without one, who had to wait has to go on waiting."""

    @property
    def running(self) -> tuple[SequenceRecord, ...]:
        """Sequences that hold pages and a slot, oldest first."""
        return tuple(self._running)

    @property
    def waiting(self) -> tuple[SequenceRecord, ...]:
        """Sequences that hold nothing, in the order in which they will be admitted."""
        return tuple(self._waiting)

    def validate(self, request: GenerationRequest, also_waiting: int = 0, also_of_client: int = 0) -> None:
        """Refuse at once what can never be served, or not now. `also_waiting` requests are on their way here, so many
        of them of the same client.

        Raises ContextLengthExceededError, ServerOverloadedError, or RequestError for an empty prompt.
        """
        refuse_unservable(request, self.limits)
        pending, client = self._pending(), request.client
        of_client = sum(sequence.request.client == client for sequence in pending) + also_of_client
        most = self.limits.max_pending_requests
        refuse_beyond_share(self._pending_allowance, most, len(pending) + also_waiting, of_client, client)

    def submit(self, request: GenerationRequest, now: float) -> None:
        """Queue a validated request; its seed is set. Raises ValueError for a request id that is alive."""
        if request.request_id in self._alive:
            raise ValueError(f"request id {request.request_id!r} is alive already")
        self._arrivals += 1
        total = len(request.prompt_token_ids) + request.sampling.max_tokens
        sequence = SequenceRecord(
            request,
            arrival=self._arrivals,
            turn=self._turns.take(request.client, self._waiting),
            submitted_at=now,
            max_total_tokens=min(total, self.limits.max_context_tokens),
            stop_token_ids=self._stop_token_ids(request),
        )
        self._alive[sequence.request_id] = sequence
        insort(self._waiting, sequence, key=order)

    def plan(self, now: float) -> StepPlan | None:
        """The next step, after room was made for it and new requests were let in; None when there is nothing to do.

        Not to be called while a step runs.
        """
        self._discard_captures()
        self._resuming.clear()
        for sequence in self.running:
            if sequence.state is SequenceState.DECODING:
                self._make_room_for_next_token(sequence, now)
        self._admit(now)
        pieces = [*self._decode_pieces(), *self._prefill_pieces()]
        resumes = self._begin_resumes(sequence for sequence, _ in pieces)
        segments = [self._segment(sequence, end) for sequence, end in pieces]
        segments.sort(key=lambda segment: not segment.is_decode)
        under_way = self.copies.under_way
        copies = self.copies.plan(now, *self.limits.copy_budget(is_alone=not pieces))
        plan = StepPlan(tuple(segments), resumes, copies, under_way)
        return plan if segments or copies or under_way else None

    def apply(self, plan: StepPlan, result: StepResult, now: float) -> list[TokenOutcome]:
        """Take in what a step picked; sequences that end have given everything back when this returns."""
        self._charge(plan, result.resume_seconds, now)
        self._land(self.copies.take_in(result.copied, result.under_way, now), now)
        for ticket in self._captures:
            self.cache.publish(ticket, now)
        self._captures.clear()
        outcomes: list[TokenOutcome] = []
        for segment in plan.segments:
            if segment.request_id not in self._alive:
                continue
            sequence = self._alive[segment.request_id]
            self.recomputed_tokens_total += sequence.compute(segment.end)
            if not segment.is_sampled:
                continue
            token_id = result.token_ids[segment.request_id]
            sequence.append(token_id, now)
            reason = sequence.end_at(token_id)
            if reason is not None:
                self.cache.finish(sequence.held, tuple(sequence.token_ids), sequence.computed_tokens, now)
                self._remove(sequence, now)
            outcomes.append(TokenOutcome(sequence, token_id, reason, result.logprobs.get(segment.request_id)))
        return outcomes

    def fail(self, plan: StepPlan, now: float) -> list[SequenceRecord]:
        """End the requests of a step that raised. Their states are in doubt, so nothing of them is kept but what was
        published before; nor is what those were resumed from that had not yet come to a token."""
        self._charge(plan, 0.0, now)
        self._discard_captures()
        self._land(self.copies.fail_step(now, has_only_copies=not plan.segments), now)
        return [self._give_up(segment.request_id, now) for segment in plan.segments]

    def give_up(self, request_ids: Iterable[str], now: float) -> list[SequenceRecord]:
        """Between a step and `apply`, end requests whose states turned out to be wrong: of what they published on the
        way to their first token nothing is kept."""
        return [self._give_up(request_id, now, distrusts_own=True) for request_id in request_ids]

    def _give_up(self, request_id: str, now: float, *, distrusts_own: bool = False) -> SequenceRecord:
        sequence = self._alive[request_id]
        lease, is_prefilling = sequence.held, sequence.state is SequenceState.PREFILLING
        self._abort(sequence, 0, now)
        if is_prefilling:
            self.cache.distrust(lease, own=distrusts_own)
        return sequence

    def stop(self, request_id: str, now: float) -> None:
        """End a request at a stop string, as if its last token had ended it; nothing happens when it has ended."""
        sequence = self._alive.get(request_id)
        if sequence is not None:
            self.cache.finish(sequence.held, tuple(sequence.token_ids), sequence.computed_tokens, now)
            self._remove(sequence, now)

    def cancel(self, request_id: str, now: float) -> SequenceRecord | None:
        """End a request wherever it is, unless it has ended. Not to be called while a step runs."""
        sequence = self._alive.get(request_id)
        return None if sequence is None else self._abort(sequence, sequence.computed_tokens, now)

    def expire(self, now: float) -> list[SequenceRecord]:
        """End the requests that have waited for their first step longer than the limit. Called after `plan`."""
        limit = self.limits.pending_timeout_seconds
        expired = [sequence for sequence in self._pending() if now - sequence.submitted_at >= limit]
        return [self._abort(sequence, 0, now) for sequence in expired]

    def check(self) -> list[str]:
        """Compare cache, leases and sequences from scratch; one line per violation, empty when sound."""
        return [*check(self.cache), *self.check_sequences()]

    def check_sequences(self) -> list[str]:
        """The same without the cache's own books."""
        alive = self._alive.keys()
        return [*check_sequences(self.cache, self._running, self._waiting, alive), *self.copies.check(self._running)]

    def _stop_token_ids(self, request: GenerationRequest) -> frozenset[int]:
        params = request.sampling
        return (frozenset[int]() if params.ignore_eos else self._end_token_ids).union(params.stop_token_ids)

    def _pending(self) -> list[SequenceRecord]:
        return [sequence for sequence in self._waiting if sequence.state is SequenceState.WAITING]

    @property
    def _pending_allowance(self) -> int:
        """Requests beyond those that run already which may be here: free seats count while nobody waits for room."""
        waits_for_room = not all(sequence.is_held_back for sequence in self._waiting)
        free_seats = 0 if waits_for_room else self.limits.max_concurrency - len(self._running)
        return self.limits.max_pending_requests + free_seats

    def _abort(self, sequence: SequenceRecord, computed_tokens: int, now: float) -> SequenceRecord:
        if sequence.lease is not None:
            self.copies.drop_restore(sequence.request_id)
            self.cache.abort(sequence.lease, tuple(sequence.token_ids), computed_tokens, now)
        self._remove(sequence, now)
        return sequence

    def _remove(self, sequence: SequenceRecord, now: float) -> None:
        (self._running if sequence.is_admitted else self._waiting).remove(sequence)
        del self._alive[sequence.request_id]
        sequence.finish(now)
        self._changes += 1

    def _charge(self, plan: StepPlan, resume_seconds: float, now: float) -> None:
        charge_step(plan, self._alive.values(), self._resuming, resume_seconds, now)
        self._resuming.clear()

    def _discard_captures(self) -> None:
        for ticket in self._captures:
            self.cache.discard(ticket)
        self._captures.clear()

    def _make_room_for_next_token(self, sequence: SequenceRecord, now: float) -> None:
        """Grow by a step of output, or at least by what the next token needs, at the cost of the youngest."""
        while sequence.is_admitted:
            lease, needed = sequence.held, len(sequence.token_ids)
            if self.cache.options.pages_of(needed) <= len(lease.pages):
                return
            if self.cache.grow(lease, self._with_output_step(sequence)) or self.cache.grow(lease, needed):
                sequence.refresh_page_ids()
                return
            if not self.copies.cancel_demotions():
                self._suspend(self._running[-1], now)

    def _suspend(self, sequence: SequenceRecord, now: float) -> None:
        self.copies.drop_restore(sequence.request_id)
        self.cache.abort(sequence.held, tuple(sequence.token_ids), sequence.computed_tokens, now)
        sequence.suspend(now)
        self.suspensions_total += 1
        self._step_back(sequence)

    def _step_back(self, sequence: SequenceRecord) -> None:
        """From those that run to those that wait."""
        self._running.remove(sequence)
        insort(self._waiting, sequence, key=order)
        self._changes += 1

    def _land(self, landed: Landed, now: float) -> None:
        for sequence in landed.restored:
            sequence.begin(now)
        for sequence in landed.lost:
            sequence.lose_restore(now)
            self._step_back(sequence)
        self._changes += landed.has_changed_something

    def _admit(self, now: float) -> None:
        lacking: list[SequenceRecord] = []
        most_seconds = self.limits.pending_timeout_seconds / 4
        for sequence in tuple(self._waiting):
            if len(self._running) >= self.limits.max_concurrency or not may_be_passed(lacking, now, most_seconds):
                return
            is_new = sequence.state is SequenceState.WAITING
            if self._may_be_admitted(sequence, now) and self._try_to_admit(sequence, now):
                self._waiting.remove(sequence)
                insort(self._running, sequence, key=order)
                if is_new:
                    self._turns.let_in(sequence)
                for each in lacking:
                    each.times_passed += 1
                continue
            sequence.tried_at = self._changes
            if not sequence.is_held_back:
                sequence.lacks_room_since = now if sequence.lacks_room_since is None else sequence.lacks_room_since
                lacking.append(sequence)

    def _may_be_admitted(self, sequence: SequenceRecord, now: float) -> bool:
        """Whether anything has changed since it had to wait: to match a long prompt at each step would cost much."""
        return sequence.tried_at != self._changes or (sequence.is_held_back and self._has_waited_enough(sequence, now))

    def _try_to_admit(self, sequence: SequenceRecord, now: float) -> bool:
        match = self._match(sequence)
        sequence.is_held_back = self._is_worth_waiting_for(sequence, match, now)
        if sequence.is_held_back:
            self.cache.release(match)
            return False
        if self._admit_with(sequence, match, now):
            return True
        if self.copies.cancel_demotions() and self._admit_with(sequence, self._match(sequence), now):
            return True
        # Alone, nothing but what it would reuse can be in its way: a partial page, or the last state slot.
        return not self._running and self._admit_with(sequence, self._match(sequence, reuses=False), now)

    def _match(self, sequence: SequenceRecord, *, reuses: bool = True) -> Match:
        request, tokens = sequence.request, tuple(sequence.token_ids)
        find = self.cache.match if reuses and not sequence.has_lost_restore else self.cache.miss
        return find(request.request_id, request.namespace, tokens)

    def _admit_with(self, sequence: SequenceRecord, match: Match, now: float) -> bool:
        named = prompt_frontiers(sequence.request)
        vacant = self.cache.slots.free - (self.limits.max_concurrency - len(self._running))
        wanted = with_places_on_the_way(named, match.known, match.cached_tokens, self._rules, vacant)
        is_first = sequence.reuse is None
        lease = self.cache.admit(match, self._with_output_step(sequence), wanted, now, is_first=is_first)
        if lease is None:
            return False
        sequence.admit(lease, now)
        if lease.is_restoring:
            self.copies.begin_restore(sequence)
        return True

    def _is_worth_waiting_for(self, sequence: SequenceRecord, match: Match, now: float) -> bool:
        """Whether a running prefill is about to publish more of this prompt than there is. Never for so long that the
        request could time out for it."""
        if sequence.state is not SequenceState.WAITING or self._has_waited_enough(sequence, now):
            return False
        return self.cache.pending_frontier(sequence.request.namespace, match.tokens) > match.cached_tokens

    def _has_waited_enough(self, sequence: SequenceRecord, now: float) -> bool:
        return now - sequence.submitted_at > self.limits.pending_timeout_seconds / 2

    def _with_output_step(self, sequence: SequenceRecord) -> int:
        return min(len(sequence.token_ids) + self.limits.output_step_tokens, sequence.max_total_tokens)

    def _decode_pieces(self) -> list[tuple[SequenceRecord, int]]:
        """What to compute, as a sequence and the position to go to."""
        return [
            (sequence, len(sequence.token_ids))
            for sequence in self._running
            if sequence.state is SequenceState.DECODING
        ]

    def _prefill_pieces(self) -> list[tuple[SequenceRecord, int]]:
        """Those that share one chunk of tokens; each to the end of its share."""
        line = [sequence for sequence in self._running if sequence.state is SequenceState.PREFILLING]
        shares = share_step([self._prefill(sequence) for sequence in line], self.limits.prefill_chunk)
        return [(each, each.computed_tokens + share) for each, share in zip(line, shares, strict=True) if share]

    def _prefill(self, sequence: SequenceRecord) -> Prefill:
        """A segment ends at the next frontier at which a state is wanted."""
        computed, end = sequence.computed_tokens, len(sequence.token_ids)
        wanted = sequence.held.wanted if self.cache.options.has_state else ()
        return Prefill(end - computed, min(next_cut(wanted, computed, end), end) - computed)

    def _begin_resumes(self, sequences: Iterable[SequenceRecord]) -> tuple[Copy, ...]:
        """The copies that these need for their first segment. Their sources are let go of at once: the step runs the
        copies before it writes anything, so that a turn may even be captured where the one before it lies."""
        copies: list[Copy] = []
        for sequence in sequences:
            if sequence.held.is_resuming:
                copies += sequence.held.resume
                self._resuming.append(sequence)
                self.cache.confirm_resume(sequence.held)
                self._changes += 1
        return tuple(copies)

    def _segment(self, sequence: SequenceRecord, end: int) -> Segment:
        start, lease = sequence.computed_tokens, sequence.held
        return Segment(
            request_id=sequence.request_id,
            token_ids=tuple(sequence.token_ids[start:end]),
            start=start,
            page_ids=sequence.page_ids[: self.cache.options.pages_of(end)],
            state_slot=self._running.index(sequence) if lease.state_unit is None else lease.state_unit,
            is_sampled=end == len(sequence.token_ids),
            sampling=sequence.request.sampling,
            edits=sequence.edits,
            capture_slot=self._capture(sequence, end),
        )

    def _capture(self, sequence: SequenceRecord, end: int) -> int | None:
        """Make ready for the checkpoints in the segment that ends here; returns the slot that its state goes to."""
        lease, slot, can_be_cut = sequence.held, None, not self.cache.options.has_state
        settle_anchors(lease, end, self._rules.chunk)
        for frontier in [f for f in lease.wanted if f.tokens == end or (can_be_cut and f.tokens < end)]:
            ticket = self.cache.capture(lease, frontier)
            self._changes += 1
            if isinstance(ticket, CaptureTicket):
                self._captures.append(ticket)
                slot = None if ticket.slot is None else ticket.slot.units[0]
        return slot
