"""Random histories of submissions, cancels, faults and steps: the ledger stays sound, every request ends, and what is
reused is what a cold run would have left."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cache import CacheOptions, CheckpointKind, ContextCache, Frontier
from engine.errors import ContextLengthExceededError, ServerOverloadedError
from engine.limits import SchedulerLimits
from engine.plan import StepPlan, StepResult
from engine.request import FinishReason, GenerationRequest, SamplingParams
from engine.scheduler import Scheduler
from tests.engine.fake_device import FakeDevice

END = 999
MAX_STEPS_TO_THE_END = 3000


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
        prompts=st.lists(st.integers(1, 6), max_size=5),
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
    ):
        limits = SchedulerLimits(max_concurrency, max_pending, 20.0, context, chunk, output_step)
        pages, slots = -(-context // page_size) + spare_pages, max_concurrency + spare_slots
        self.cache = ContextCache(CacheOptions(page_size, pages, slots * has_state, has_state, prefix_reuse))
        self.scheduler = Scheduler(limits, self.cache, end_token_ids=[END])
        self.device = FakeDevice(self.cache)
        self.now = 0.0
        self.submitted = 0
        self.prompts: dict[str, tuple[int, ...]] = {}
        self.outputs: dict[str, list[int]] = {}
        self.ended: set[str] = set()
        self.reused: dict[str, int] = {}
        for prompt_tokens in prompts:
            self.submit(tuple(range(prompt_tokens)), context)

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
    @rule(data=st.data(), max_tokens=st.integers(1, 44))
    def submit_again(self, data, max_tokens):
        self.submit(self.prompts[data.draw(st.sampled_from(sorted(self.prompts)[-6:]))], max_tokens)

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
        self.submitted += 1
        self.prompts[name], self.outputs[name] = tokens, []

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def cancel(self, data):
        name = data.draw(st.sampled_from(sorted(self.alive)))
        assert self.scheduler.cancel(name, self.now) is not None
        self.ended.add(name)

    @rule(times=st.integers(1, 8))
    def steps(self, times):
        for _ in range(times):
            self.step(0.0, False)

    @rule(seconds=st.sampled_from([0.0, 1.0, 8.0, 15.0]), ends=st.booleans())
    def step(self, seconds, ends):
        self.now += seconds
        plan = self.scheduler.plan(self.now)
        self.ended.update(sequence.request_id for sequence in self.scheduler.expire(self.now))
        if plan is None:
            assert not self.alive
            return
        self.check_plan(plan)
        self.take_in(plan, END if ends else None)

    @rule(spoils=st.booleans())
    def failing_step(self, spoils):
        plan = self.scheduler.plan(self.now)
        if plan is not None:
            if spoils:
                self.device.spoil(plan)
            else:
                self.device.run(plan, self.tokens_of)
            self.ended.update(each.request_id for each in self.scheduler.fail(plan, self.now))

    def tokens_of(self, name):
        return (*self.prompts[name], *self.outputs[name])

    def take_in(self, plan: StepPlan, token_id: int | None = None):
        self.device.run(plan, self.tokens_of)
        picked = {each.request_id: token_id or each.end for each in plan.segments if each.is_sampled}
        for outcome in self.scheduler.apply(plan, StepResult(picked), self.now):
            name = outcome.sequence.request_id
            reuse = outcome.sequence.reuse
            assert self.reused.setdefault(name, reuse.cached_tokens) == reuse.cached_tokens < reuse.prompt_tokens
            if outcome.finish_reason is not FinishReason.STOP:
                self.outputs[name].append(outcome.token_id)
            if outcome.finish_reason is not None:
                self.ended.add(name)

    def check_plan(self, plan: StepPlan):
        names = [segment.request_id for segment in plan.segments]
        slots = [segment.state_slot for segment in plan.segments]
        captures = [segment.capture_slot for segment in plan.segments if segment.capture_slot is not None]
        decodes = [segment.is_decode for segment in plan.segments]
        limits, options = self.scheduler.limits, self.cache.options
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
            is_cut = segment.end % limits.prefill_chunk == 0 or segment.capture_slot is not None
            assert segment.is_sampled or is_cut or self.was_wanted(segment)

    def was_wanted(self, segment) -> bool:
        """Whether a checkpoint was wanted at its end, which had to be left out."""
        return bool(self.cache.stats.publish_skipped)

    @property
    def alive(self) -> set[str]:
        return self.prompts.keys() - self.ended

    @invariant()
    def the_books_agree(self):
        if hasattr(self, "scheduler"):
            assert self.scheduler.check() == []
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
        for pool in (self.cache.pages, self.cache.slots):
            assert (pool.counts().pinned, pool.counts().in_flight) == (0, 0)
        self.cache.reset()
        assert self.cache.pages.free == self.cache.pages.capacity
        assert self.cache.slots.free == self.cache.slots.capacity


SchedulerMachine.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    report_multiple_bugs=False,
)
TestSchedulerHistories = SchedulerMachine.TestCase
