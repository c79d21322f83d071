"""A daemon without a model: the real cache, the scheduler's rules, and a clock that moves by what steps would cost."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterable

from bench.replay.copies import BackgroundCopies
from bench.replay.cost_model import CostModel
from bench.replay.history import named_frontiers
from bench.replay.measure import Measurements, Sample, Served
from bench.replay.requests import SimRequest, Symbols
from bench.replay.sizes import Scale, Sizes, cache_options
from cache import CaptureTicket, ContextCache, Copy, Fault, Match, PoolCounts, RequestLease, ReuseReport, Tier, audit
from engine.frontiers import FrontierRules, next_cut, settle_anchors, with_places_on_the_way
from engine.packing import Prefill, share_step

_OUTPUT_STEP_TOKENS = 64
_MOST_HELD_BACK_SECONDS = 30.0
_FOREVER = float("inf")


class SimSequence:
    """One request on its way through. Mutable: only its SimServer may change it."""

    __slots__ = (
        "achievable_tokens",
        "admitted_at",
        "computed",
        "first_token_at",
        "is_held_back",
        "lease",
        "produced_tokens",
        "ready_at",
        "report",
        "request",
        "sent_at",
        "sequence",
        "tried_at",
    )

    def __init__(self, request: SimRequest, sent_at: float, achievable_tokens: int, scale: Scale) -> None:
        self.request = request
        self.sent_at = sent_at
        self.achievable_tokens = achievable_tokens
        answer = request.answer or _unknown(request.number, scale.symbols(request.output_tokens))
        self.sequence: Symbols = request.prompt + answer
        """The prompt and all of the answer, in symbols."""
        self.produced_tokens = 0
        self.computed = 0
        """Symbols, of the prompt and, for one that was suspended, of what it had answered."""
        self.lease: RequestLease | None = None
        self.report: ReuseReport | None = None
        self.ready_at = 0.0
        """When what it is resumed from is on the device."""
        self.first_token_at: float | None = None
        self.is_held_back = False
        self.tried_at = -1

    @property
    def request_id(self) -> str:
        return str(self.request.number)

    @property
    def held(self) -> RequestLease:
        assert self.lease is not None
        return self.lease


class SimServer:
    """First come, first served; chunked prefill beside decode. Mutable: `advance` moves its clock."""

    def __init__(
        self,
        sizes: Sizes,
        scale: Scale,
        model: CostModel,
        measurements: Measurements,
        cache: ContextCache | None = None,
    ) -> None:
        """`cache` is one that others watch, or in which faults are switched on; None makes one."""
        self.now = 0.0
        self.cache = cache or ContextCache(cache_options(sizes, scale, model))
        self.answered: deque[SimSequence] = deque()
        """Those that have ended since someone looked."""
        self._sizes = sizes
        self._scale = scale
        self._model = model
        self._measurements = measurements
        self._copies = BackgroundCopies(self.cache, model, measurements.moved_bytes)
        self._waiting: deque[SimSequence] = deque()
        self._prefilling: list[SimSequence] = []
        self._decoding: list[SimSequence] = []
        self._changes = 0
        self.rules = FrontierRules.of(self.cache.options, sizes.max_concurrency, scale.chunk_symbols)

    @property
    def is_idle(self) -> bool:
        return not (self._waiting or self._prefilling or self._decoding)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def prefilling(self) -> int:
        return len(self._prefilling)

    @property
    def decoding(self) -> int:
        return len(self._decoding)

    @property
    def _running(self) -> int:
        return len(self._prefilling) + len(self._decoding)

    def submit(self, request: SimRequest, achievable_tokens: int) -> bool:
        """Queue a request at this moment. False, and it is counted, when it can never fit."""
        sequence = SimSequence(request, self.now, achievable_tokens, self._scale)
        if not self.cache.fits_alone(len(sequence.sequence)):
            self._measurements.refused += 1
            return False
        self._waiting.append(sequence)
        return True

    def advance(self, until: float) -> None:
        """One step, or as many steps of decode as nothing can happen in; not much beyond `until`."""
        self._copies.settle(self.now)
        self._end_restores()
        self._admit()
        self._copies.demote(self.now)
        pieces = self._pieces()
        until = min([until, *(sequence.ready_at for sequence in self._prefilling if sequence.held.is_restoring)])
        if pieces:
            self._prefill(pieces)
        elif self._decoding:
            self._decode(until)
        else:
            self.now = max(self.now, until)

    def sample(self) -> None:
        """Write down the pools."""
        cache = self.cache
        pools = {pool.name: pool.counts() for pool in (cache.slots, cache.pages, cache.host) if pool.capacity}
        if cache.options.host_states:
            pools["host_state_slots"] = _host_states(cache)
        self._measurements.samples.append(Sample(self.now, pools, len(self._waiting), self._running))

    def audit(self) -> None:
        """Check everything from scratch, and write down what was found."""
        report = audit(self.cache)
        self._measurements.checks += 1
        self._measurements.violations += [f"at {self.now:.0f} s: {line}" for line in report.violations]

    # -- admission

    def _admit(self) -> None:
        for sequence in tuple(self._waiting):
            if self._running >= self._sizes.max_concurrency:
                return
            if sequence.tried_at != self._changes or self._has_waited_enough(sequence):
                if self._try_to_admit(sequence):
                    self._waiting.remove(sequence)
                    insort(self._prefilling, sequence, key=_arrival)
                    continue
                sequence.tried_at = self._changes
            if not sequence.is_held_back:
                return

    def _try_to_admit(self, sequence: SimSequence) -> bool:
        request, cache = sequence.request, self.cache
        tokens = sequence.sequence[: len(request.prompt) + self._scale.symbols(sequence.produced_tokens)]
        match = cache.match(sequence.request_id, request.namespace, tokens)
        pending = 0
        if not sequence.produced_tokens and not self._has_waited_enough(sequence):
            pending = cache.pending_frontier(request.namespace, tokens)
        sequence.is_held_back = pending > match.cached_tokens
        if sequence.is_held_back:
            cache.release(match)
            return False
        if self._admit_with(sequence, match):
            return True
        return not self._running and self._admit_with(
            sequence, cache.miss(sequence.request_id, request.namespace, tokens)
        )

    def _admit_with(self, sequence: SimSequence, match: Match) -> bool:
        named = named_frontiers(sequence.request)
        vacant = self.cache.slots.free - (self._sizes.max_concurrency - self._running)
        wanted = with_places_on_the_way(named, match.known, match.cached_tokens, self.rules, vacant)
        reserve = len(match.tokens) + self._scale.symbols(_OUTPUT_STEP_TOKENS)
        lease = self.cache.admit(
            match,
            min(reserve, len(sequence.sequence)),
            wanted,
            self.now,
            is_first=sequence.report is None,
        )
        if lease is None:
            return False
        sequence.lease = lease
        sequence.report = sequence.report or lease.report
        sequence.computed = lease.cached_tokens
        if lease.is_restoring:
            sequence.ready_at = self._copies.begin_restore(lease, self.now)
        return True

    def _end_restores(self) -> None:
        for sequence in tuple(self._prefilling):
            if sequence.held.is_restoring and sequence.ready_at <= self.now:
                if Fault.RESTORE_FAIL in self.cache.faults:
                    self._fail_restore(sequence)
                else:
                    self.cache.confirm_restore(sequence.held, self.now)
                self._changes += 1

    def _fail_restore(self, sequence: SimSequence) -> None:
        """It is let in once more, as if for the first time, without what could not be copied."""
        self.cache.fail_restore(sequence.held, self.now)
        self._prefilling.remove(sequence)
        sequence.lease = sequence.report = None
        self._waiting.appendleft(sequence)

    def _has_waited_enough(self, sequence: SimSequence) -> bool:
        return sequence.is_held_back and self.now - sequence.sent_at > _MOST_HELD_BACK_SECONDS

    # -- steps

    def _pieces(self) -> list[tuple[SimSequence, int]]:
        """Those that share one chunk, as the engine's scheduler shares it; each to the end of its share."""
        line = [sequence for sequence in self._prefilling if not sequence.held.is_restoring]
        shares = share_step([self._prefill_of(sequence) for sequence in line], self._scale.chunk_symbols)
        return [(each, each.computed + share) for each, share in zip(line, shares, strict=True) if share]

    def _prefill_of(self, sequence: SimSequence) -> Prefill:
        start, goal = sequence.computed, self._goal(sequence)
        return Prefill(goal - start, min(next_cut(sequence.held.wanted, start, goal), goal) - start)

    def _goal(self, sequence: SimSequence) -> int:
        return len(sequence.request.prompt) + self._scale.symbols(sequence.produced_tokens)

    def _prefill(self, pieces: list[tuple[SimSequence, int]]) -> None:
        seconds, computed, tickets = 0.0, 0, []
        for sequence, end in pieces:
            tokens = (end - sequence.computed) * self._scale.tokens_per_symbol
            if end == len(sequence.request.prompt):
                tokens -= end * self._scale.tokens_per_symbol - sequence.request.prompt_tokens
            computed += end - sequence.computed
            seconds += tokens / self._model.prefill_tokens_per_second
            seconds += self._resume(sequence.held)
            settle_anchors(sequence.held, end, self.rules.chunk)
            for frontier in [f for f in sequence.held.wanted if f.tokens == end]:
                ticket = self.cache.capture(sequence.held, frontier)
                self._changes += 1
                if isinstance(ticket, CaptureTicket):
                    tickets.append(ticket)
                    seconds += self._copy_on_device(() if ticket.copy is None else (ticket.copy,))
        self.cache.costs.saw_prefill(computed, seconds, self.now + seconds)
        growing = [sequence for sequence in tuple(self._decoding) if self._has_room(sequence)]
        seconds += self._model.decode_seconds(len(growing))
        self.now += seconds
        for ticket in tickets:
            self.cache.publish(ticket, self.now)
        for sequence, end in pieces:
            if sequence.lease is None:  # Suspended, for the sake of one that decodes.
                continue
            sequence.computed = end
            if end == self._goal(sequence):
                self._prefilling.remove(sequence)
                self._decoding.append(sequence)
                if sequence.first_token_at is None:
                    sequence.first_token_at = self.now
                self._produce(sequence, 1)
        for sequence in growing:
            self._produce(sequence, 1)

    def _decode(self, until: float) -> None:
        """As many steps as fit before `until`, before one ends and before one needs another page."""
        growing = [sequence for sequence in tuple(self._decoding) if self._has_room(sequence)]
        growing = [sequence for sequence in growing if sequence.lease is not None]
        if not growing:
            return
        step_seconds = self._model.decode_seconds(len(growing))
        steps = min(min(self._left(sequence), self._capacity(sequence)) for sequence in growing)
        if self._running < self._sizes.max_concurrency:
            steps = min(steps, max(int((until - self.now) / step_seconds), 1))
        self.now += steps * step_seconds
        for sequence in growing:
            self._produce(sequence, steps)

    def _left(self, sequence: SimSequence) -> int:
        return sequence.request.output_tokens - sequence.produced_tokens

    def _capacity(self, sequence: SimSequence) -> int:
        """Output tokens for which it has room already."""
        held = len(sequence.held.pages) * self._scale.page_tokens
        return held - len(sequence.request.prompt) * self._scale.tokens_per_symbol - sequence.produced_tokens

    def _has_room(self, sequence: SimSequence) -> bool:
        """Make room for the next token, at the cost of the youngest. False when that was the sequence itself."""
        while sequence.lease is not None:
            if self._capacity(sequence) > 0:
                return True
            needed = len(sequence.request.prompt) + self._scale.symbols(sequence.produced_tokens + 1)
            ahead = needed + self._scale.symbols(_OUTPUT_STEP_TOKENS)
            if self.cache.grow(sequence.lease, min(ahead, len(sequence.sequence))):
                continue
            if self.cache.grow(sequence.lease, needed):
                continue
            self._suspend(max((*self._prefilling, *self._decoding), key=_arrival))
        return False

    def _suspend(self, sequence: SimSequence) -> None:
        tokens, computed = self._computed(sequence)
        self.cache.abort(sequence.held, tokens, computed, self.now)
        (self._prefilling if sequence in self._prefilling else self._decoding).remove(sequence)
        sequence.lease = None
        self._waiting.appendleft(sequence)
        self._measurements.suspensions += 1
        self._changes += 1

    def _computed(self, sequence: SimSequence) -> tuple[Symbols, int]:
        """What is in the pages and in the state, as whole symbols; the last token that was picked never is."""
        if sequence.computed < self._goal(sequence):
            return sequence.sequence[: sequence.computed], sequence.computed
        computed = len(sequence.request.prompt) + max(sequence.produced_tokens - 1, 0) // self._scale.tokens_per_symbol
        return sequence.sequence[:computed], computed

    def _produce(self, sequence: SimSequence, tokens: int) -> None:
        if sequence.lease is None:
            return
        sequence.produced_tokens += tokens
        sequence.computed = self._goal(sequence)
        if self._left(sequence) <= 0:
            self._finish(sequence)

    def _finish(self, sequence: SimSequence) -> None:
        if sequence.request.answer:
            whole = len(sequence.sequence)
            self.cache.finish(sequence.held, sequence.sequence, whole - 1, self.now)
        else:
            self.cache.abort(sequence.held, sequence.request.prompt, 0, self.now)
        self._decoding.remove(sequence)
        sequence.lease = None
        self._changes += 1
        self.answered.append(sequence)
        self._write_down(sequence)

    def _write_down(self, sequence: SimSequence) -> None:
        report, tokens = sequence.report, self._scale.tokens_per_symbol
        assert report is not None
        assert sequence.first_token_at is not None
        self._measurements.served.append(
            Served(
                sent_at=sequence.sent_at,
                first_token_at=sequence.first_token_at,
                ended_at=self.now,
                prompt_tokens=sequence.request.prompt_tokens,
                cached_tokens=report.cached_tokens * tokens,
                host_tokens=report.source[Tier.HOST] * tokens,
                achievable_tokens=sequence.achievable_tokens,
                path=report.path,
                lost={reason: lost * tokens for reason, lost in report.lost.items()},
            )
        )

    # -- bytes

    def _resume(self, lease: RequestLease) -> float:
        """Run what has to be copied within the device before the first segment; returns what it costs."""
        if not lease.is_resuming:
            return 0.0
        seconds = self._copy_on_device(lease.resume)
        self.cache.confirm_resume(lease)
        self._changes += 1
        return seconds

    def _copy_on_device(self, copies: Iterable[Copy]) -> float:
        moved = self.cache.options.bytes_of(copies)
        self._measurements.moved_bytes["within the device"] += moved
        return moved / self._model.device_copy_bytes_per_second


def _host_states(cache: ContextCache) -> PoolCounts:
    """State images in host memory, against the most that fit."""
    capacity, held = cache.options.host_states, cache.tiers.host_states
    in_flight = sum(demotion.state is not None for demotion in cache.demotions.under_way)
    return PoolCounts(capacity, capacity - held, cached=held - in_flight, pinned=0, in_flight=in_flight)


def _arrival(sequence: SimSequence) -> tuple[float, int]:
    return sequence.sent_at, sequence.request.number


def _unknown(number: int, symbols: int) -> Symbols:
    """Symbols for an answer that the trace does not tell; nobody else has them."""
    first = -1 - (number << 20)
    return tuple(range(first, first - symbols, -1))
