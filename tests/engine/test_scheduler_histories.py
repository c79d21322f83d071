"""Random histories of submissions, cancels, faults and steps: the ledger stays sound and every request ends."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cache import Pool
from engine.errors import ContextLengthExceededError, ServerOverloadedError
from engine.plan import StepPlan, StepResult
from engine.request import FinishReason, GenerationRequest, SamplingParams
from engine.scheduler import Scheduler, SchedulerLimits

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
        prompts=st.lists(st.integers(1, 6), max_size=5),
    )
    def start(self, max_concurrency, max_pending, context, chunk, page_size, output_step, spare_pages, prompts):
        limits = SchedulerLimits(max_concurrency, max_pending, 20.0, context, chunk, page_size, output_step)
        pages = Pool("pages", limits.pages_of(context) + spare_pages)
        self.scheduler = Scheduler(limits, pages, Pool("slots", max_concurrency), end_token_ids=[END])
        self.now = 0.0
        self.submitted = 0
        self.prompts: dict[str, int] = {}
        self.outputs: dict[str, list[int]] = {}
        self.ended: set[str] = set()
        for prompt_tokens in prompts:
            self.submit(prompt_tokens, context)

    @rule(prompt_tokens=st.integers(1, 12) | st.integers(1, 44), max_tokens=st.integers(1, 44) | st.just(44))
    def submit_one(self, prompt_tokens, max_tokens):
        self.submit(prompt_tokens, max_tokens)

    def submit(self, prompt_tokens, max_tokens):
        name = f"r{self.submitted}"
        request = GenerationRequest(name, tuple(range(prompt_tokens)), SamplingParams(seed=0, max_tokens=max_tokens))
        alive = len(self.scheduler.running) + len(self.scheduler.waiting)
        limits = self.scheduler.limits
        try:
            self.scheduler.validate(request)
        except ContextLengthExceededError:
            assert prompt_tokens >= limits.max_context_tokens
            return
        except ServerOverloadedError:
            assert alive >= limits.max_pending_requests
            return
        self.scheduler.submit(request, self.now)
        self.submitted += 1
        self.prompts[name], self.outputs[name] = prompt_tokens, []

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def cancel(self, data):
        name = data.draw(st.sampled_from(sorted(self.alive)))
        assert self.scheduler.cancel(name) is not None
        self.ended.add(name)

    @rule(times=st.integers(1, 8))
    def steps(self, times):
        for _ in range(times):
            self.step(0.0, False)

    @rule(seconds=st.sampled_from([0.0, 1.0, 15.0]), ends=st.booleans())
    def step(self, seconds, ends):
        self.now += seconds
        plan = self.scheduler.plan(self.now)
        self.ended.update(sequence.request_id for sequence in self.scheduler.expire(self.now))
        if plan is None:
            assert not self.alive
            return
        self.check_plan(plan)
        self.take_in(plan, END if ends else None)

    @rule()
    def failing_step(self):
        plan = self.scheduler.plan(self.now)
        if plan is not None:
            self.ended.update(each.request_id for each in self.scheduler.abort(s.request_id for s in plan.segments))

    def take_in(self, plan: StepPlan, token_id: int | None = None):
        picked = {each.request_id: token_id or each.end for each in plan.segments if each.is_sampled}
        for outcome in self.scheduler.apply(plan, StepResult(picked), self.now):
            name = outcome.sequence.request_id
            if outcome.finish_reason is not FinishReason.STOP:
                self.outputs[name].append(outcome.token_id)
            if outcome.finish_reason is not None:
                self.ended.add(name)

    def check_plan(self, plan: StepPlan):
        names = [segment.request_id for segment in plan.segments]
        slots = [segment.state_slot for segment in plan.segments]
        pages = [page for segment in plan.segments for page in segment.page_ids.tolist()]
        decodes = [segment.is_decode for segment in plan.segments]
        limits = self.scheduler.limits
        assert len(set(names)) == len(names)
        assert len(set(slots)) == len(slots) <= limits.max_concurrency
        assert len(set(pages)) == len(pages)
        assert decodes == sorted(decodes, reverse=True)
        assert plan.num_tokens <= limits.prefill_chunk + limits.max_concurrency
        for segment in plan.segments:
            assert len(segment.page_ids) == limits.pages_of(segment.end)
            assert segment.is_sampled or segment.end % limits.prefill_chunk == 0

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
            first = self.prompts[name]
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
        assert self.scheduler.kv_pages.free == self.scheduler.kv_pages.capacity
        assert self.scheduler.state_slots.free == self.scheduler.state_slots.capacity


SchedulerMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestSchedulerHistories = SchedulerMachine.TestCase
