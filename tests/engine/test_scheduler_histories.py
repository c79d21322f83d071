"""Random histories of submissions, cancels, faults, failed copies, resets and steps: the ledger stays sound, every
request ends, and what is reused is what a cold run would have left."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cache import CacheOptions, CheckpointKind, ContextCache, Frontier, Tier
from engine.errors import ContextLengthExceededError, ServerOverloadedError
from engine.limits import SchedulerLimits
from engine.phases import Phase
from engine.plan import StepPlan, StepResult
from engine.request import FinishReason, GenerationRequest, SamplingParams
from engine.scheduler import Scheduler
from engine.sequence import SequenceRecord, SequenceState
from tests.engine.fake_device import FakeDevice

END = 999
MAX_STEPS_TO_THE_END = 3000
STEP_SECONDS = 1 / 64


class SchedulerMachine(RuleBasedStateMachine):
    """The scheduler on pools of any size. A picked token is its own position, so a lost or repeated one would show."""

    @initialize(
        max_concurrency=st.integers(1, 4) | st.just(3),
        max_pending=st.integers(0, 4),
        context=st.integers(2, 40) | st.just(40),
        chunk=st.integers(1, 12),
        page_size=st.integers(1, 5),
        output_step=st.integers(1, 9) | st.just(1),
        spare_pages=st.integers(0, 12) | st.just(0),
        spare_slots=st.integers(0, 4),
        has_state=st.booleans() | st.just(True),
        prefix_reuse=st.sampled_from([True, True, True, False]),
        prompts=st.lists(st.integers(1, 20), max_size=5),
        host_units=st.sampled_from([0, 9, 40, 120, 120]),
        units_per_state=st.integers(1, 3),
        host_state_cap=st.sampled_from([None, None, 1, 4]),
        demote_ahead=st.sampled_from([None, 0, 2]),
        copy_bytes=st.sampled_from([1, 2, 5, 1000]),
    )
    def start(
        self,
        max_concurrency,
        max_pending,
        context,
        chunk,
        page_size,
        output_step,
        spare_pages,
        spare_slots,
        has_state,
        prefix_reuse,
        prompts,
        host_units,
        units_per_state,
        host_state_cap,
        demote_ahead,
        copy_bytes,
    ):
        limits = SchedulerLimits(
            max_concurrency, max_pending, 20.0, context, chunk, output_step, copy_bytes, 3 * copy_bytes
        )
        pages, slots = -(-context // page_size) + spare_pages, max_concurrency + spare_slots
        self.cache = ContextCache(
            CacheOptions(
                page_size,
                pages,
                slots * has_state,
                has_state,
                prefix_reuse,
                host_units=host_units,
                host_units_per_state=units_per_state,
                host_state_cap=host_state_cap,
                demote_ahead=demote_ahead,
            )
        )
        self.scheduler = Scheduler(limits, self.cache, end_token_ids=[END])
        self.device = self.new_device()
        self.now = 0.0
        self.submitted = 0
        self.prompts: dict[str, tuple[int, ...]] = {}
        self.outputs: dict[str, list[int]] = {}
        self.ended: set[str] = set()
        self.records: dict[str, SequenceRecord] = {}
        """Of those that have not ended, or not been accounted for."""
        self.reused: dict[str, int] = {}
        for number, prompt_tokens in enumerate(prompts):
            self.submit(tuple(range(100 * number, 100 * number + prompt_tokens)), context)

    def new_device(self) -> FakeDevice:
        return FakeDevice(self.cache)

    @rule(
        data=st.data(),
        keep=st.sampled_from([100, 100, 0, 3, 8, 13]),
        fresh=st.lists(st.integers(0, 2), min_size=1, max_size=9)
        | st.lists(st.integers(0, 2), min_size=1, max_size=44),
        max_tokens=st.integers(1, 44) | st.just(44),
    )
    def submit_one(self, data, keep, fresh, max_tokens):
        base = ()
        if self.prompts:
            name = data.draw(st.sampled_from(sorted(self.prompts)[-6:]))
            base = (*self.prompts[name], *self.outputs[name])
        tokens = (*base[: min(keep, 44 - len(fresh))], *fresh)
        stable = data.draw(st.integers(0, len(tokens)))
        self.submit(tokens, max_tokens, (Frontier(stable, CheckpointKind.SHARED_STABLE_PREFIX),))

    @precondition(lambda self: self.prompts)
    @rule(data=st.data(), max_tokens=st.integers(1, 44), goes_on=st.booleans())
    def submit_again(self, data, max_tokens, goes_on):
        name = data.draw(st.sampled_from(sorted(self.prompts)))
        self.submit((*self.prompts[name], *(self.outputs[name] if goes_on else ())), max_tokens)

    def submit(self, tokens, max_tokens, frontiers=()):
        name = f"r{self.submitted:04}"
        sampling = SamplingParams(seed=0, max_tokens=max_tokens)
        request = GenerationRequest(name, tokens, sampling, frontiers=frontiers)
        alive = len(self.scheduler.running) + len(self.scheduler.waiting)
        limits = self.scheduler.limits
        try:
            self.scheduler.validate(request)
        except ContextLengthExceededError:
            assert len(tokens) >= limits.max_context_tokens
            return
        except ServerOverloadedError:
            assert alive >= limits.max_pending_requests
            return
        self.scheduler.submit(request, self.now)
        self.records[name] = next(each for each in self.scheduler.waiting if each.request_id == name)
        self.submitted += 1
        self.prompts[name], self.outputs[name] = tokens, []

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def cancel(self, data):
        name = data.draw(st.sampled_from(sorted(self.alive)))
        assert self.scheduler.cancel(name, self.now) is not None
        self.ended.add(name)

    @precondition(lambda self: self.restoring)
    @rule(data=st.data())
    def cancel_a_restore(self, data):
        name = data.draw(st.sampled_from(self.restoring))
        assert self.scheduler.cancel(name, self.now) is not None
        self.ended.add(name)

    @property
    def restoring(self) -> list[str]:
        running = self.scheduler.running
        return [each.request_id for each in running if each.state is SequenceState.RESTORING]

    def everything_ends(self):
        for _ in range(200):
            if not self.alive and not self.cache.demotions.under_way:
                break
            self.step(0.0, False, False)

    def step_once(self):
        self.step(0.0, False, False)

    @rule(count=st.integers(1, 5), then=st.sampled_from([everything_ends, everything_ends, step_once, None]))
    def the_oldest_come_again(self, count, then):
        for name in sorted(self.prompts)[:count]:
            self.submit(self.prompts[name], 2)
            if then is not None:
                then(self)

    @rule(times=st.integers(1, 8))
    def steps(self, times):
        for _ in range(times):
            self.step(0.0, False, False)

    @rule(tiers=st.sets(st.sampled_from([Tier.DEVICE, Tier.HOST])))
    def reset(self, tiers):
        self.cache.reset(tiers)

    @rule(seconds=st.sampled_from([0.0, 1.0, 8.0, 15.0]), ends=st.booleans(), copies_fail=st.booleans())
    def step(self, seconds, ends, copies_fail):
        self.now += seconds
        skipped = self.cache.stats.publish_skipped.total()
        plan = self.scheduler.plan(self.now)
        self.ended.update(sequence.request_id for sequence in self.scheduler.expire(self.now))
        self.account()
        if plan is None:
            assert not self.alive
            return
        self.check_plan(plan)
        if self.cache.stats.publish_skipped.total() == skipped:
            self.check_shares(plan)
        self.take_in(plan, END if ends else None, copies_fail=copies_fail)

    @rule(spoils=st.booleans())
    def failing_step(self, spoils):
        plan = self.scheduler.plan(self.now)
        if plan is not None:
            if spoils:
                self.device.spoil(plan)
            else:
                self.device.run(plan, self.tokens_of)
            self.device.abandon()
            self.ended.update(each.request_id for each in self.scheduler.fail(plan, self.now))

    def tokens_of(self, name):
        return (*self.prompts[name], *self.outputs[name])

    def take_in(self, plan: StepPlan, token_id: int | None = None, *, copies_fail: bool = False):
        failing = [batch.number for batch in plan.background if copies_fail]
        copied = self.device.run(plan, self.tokens_of, failing=failing)
        picked = {each.request_id: token_id or each.end for each in plan.segments if each.is_sampled}
        resume_seconds = STEP_SECONDS / 4 if plan.resumes else 0.0
        result = StepResult(picked, copied=copied, under_way=self.device.under_way, resume_seconds=resume_seconds)
        before, phases = self.seconds_of_the_living(), self.phases_of_the_living(plan)
        self.now += STEP_SECONDS
        for outcome in self.scheduler.apply(plan, result, self.now):
            name = outcome.sequence.request_id
            reuse = outcome.sequence.reuse
            assert self.reused.setdefault(name, reuse.cached_tokens) == reuse.cached_tokens < reuse.prompt_tokens
            if outcome.finish_reason is not FinishReason.STOP:
                self.outputs[name].append(outcome.token_id)
            if outcome.finish_reason is not None:
                self.ended.add(name)
        for name, seconds in self.seconds_of_the_living().items():
            assert {each for each in Phase if seconds[each] != before[name][each]} <= phases[name]
            assert sum(seconds.values()) == pytest.approx(self.now - self.records[name].submitted_at)
        self.account()

    def account(self):
        """All the time of each request, from its submission to now or to its end, is charged to some phase."""
        for name in self.records.keys() & self.ended:
            record = self.records.pop(name)
            assert sum(record.clock.seconds.values()) == pytest.approx(self.now - record.submitted_at)

    def seconds_of_the_living(self) -> dict[str, dict[Phase, float]]:
        return {name: dict(record.clock.seconds) for name, record in self.records.items()}

    def phases_of_the_living(self, plan: StepPlan) -> dict[str, set[Phase]]:
        """What the step that is about to end may be charged as."""
        computed = {segment.request_id for segment in plan.segments}
        found = {name: {record.phase} for name, record in self.records.items()}
        for name in [name for name, phases in found.items() if phases == {Phase.PREFILL}]:
            found[name] = {Phase.PREFILL, Phase.STALLED, Phase.RESTORE} if name in computed else {Phase.STALLED}
        return found

    def check_plan(self, plan: StepPlan):
        names = [segment.request_id for segment in plan.segments]
        slots = [segment.state_slot for segment in plan.segments]
        captures = [segment.capture_slot for segment in plan.segments if segment.capture_slot is not None]
        decodes = [segment.is_decode for segment in plan.segments]
        limits, options = self.scheduler.limits, self.cache.options
        assert names or plan.background or plan.under_way
        budget = limits.copy_bytes if names else limits.copy_bytes_alone
        copies = [copy for batch in plan.background for copy in batch.copies]
        assert not copies or options.bytes_of(copies[:-1]) < budget
        assert len({batch.number for batch in plan.background}) == len(plan.background)
        assert len(set(names)) == len(names)
        assert len({*slots, *captures}) == len(slots) + len(captures)
        assert len(slots) <= limits.max_concurrency
        assert decodes == sorted(decodes, reverse=True)
        assert plan.num_tokens <= limits.prefill_chunk + limits.max_concurrency
        written: set[int] = set()
        for segment in plan.segments:
            table = segment.page_ids.tolist()
            assert len(set(table)) == len(table) == options.pages_of(segment.end)
            mine = set(table[segment.start // options.page_size :])
            assert not written & mine
            written |= mine

    def check_shares(self, plan: StepPlan):
        """Nothing of the budget is left while a prompt waits or is cut where no state is wanted; the oldest has half of
        it, or as much as it can take. Not to be asked where a state that was wanted finds no slot."""
        line = [each for each in self.scheduler.running if each.state is SequenceState.PREFILLING]
        if not line:
            return
        of_request = {segment.request_id: segment for segment in plan.segments}
        shares = {each.request_id: 0 for each in line}
        shares |= {name: len(of_request[name].token_ids) for name in shares.keys() & of_request.keys()}
        chunk, has_wish = self.scheduler.limits.prefill_chunk, False
        for sequence in line:
            share, left = shares[sequence.request_id], len(sequence.token_ids) - sequence.computed_tokens
            has_ended = share == left or (share > 0 and of_request[sequence.request_id].capture_slot is not None)
            has_wish |= not has_ended
            assert sequence is not line[0] or has_ended or share >= -(-chunk // 2)
        assert not has_wish or sum(shares.values()) == chunk

    @property
    def alive(self) -> set[str]:
        return self.prompts.keys() - self.ended

    @invariant()
    def the_books_agree(self):
        if hasattr(self, "scheduler"):
            assert self.scheduler.check() == []
            self.account()
            here = {each.request_id for each in (*self.scheduler.running, *self.scheduler.waiting)}
            assert here == self.alive

    @invariant()
    def every_output_is_in_order_and_whole(self):
        for name, tokens in getattr(self, "outputs", {}).items():
            first = len(self.prompts[name])
            assert tokens == list(range(first, first + len(tokens)))

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        for _ in range(MAX_STEPS_TO_THE_END):
            plan = self.scheduler.plan(self.now)
            if plan is None:
                break
            self.take_in(plan)
            assert self.scheduler.check() == []
        assert self.alive == set()
        self.every_output_is_in_order_and_whole()
        assert self.cache.demotions.under_way == ()
        for pool in (self.cache.pages, self.cache.slots, self.cache.host):
            assert (pool.counts().pinned, pool.counts().in_flight) == (0, 0)
        self.cache.reset()
        assert self.cache.pages.free == self.cache.pages.capacity
        assert self.cache.slots.free == self.cache.slots.capacity
        assert self.cache.host.free == self.cache.host.capacity


SchedulerMachine.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    report_multiple_bugs=False,
)
TestSchedulerHistories = SchedulerMachine.TestCase
