"""A scheduler with its cache on tiny pools, and a device and host memory that notice wrong bytes."""

from __future__ import annotations

from dataclasses import replace

from cache import CacheOptions, ContextCache
from engine.limits import SchedulerLimits
from engine.plan import StepPlan, StepResult
from engine.request import GenerationRequest, SamplingParams
from engine.scheduler import Scheduler, TokenOutcome
from tests.engine.fake_device import FakeDevice

LIMITS = SchedulerLimits(
    max_concurrency=3,
    max_pending_requests=4,
    pending_timeout_seconds=10.0,
    max_context_tokens=64,
    prefill_chunk=8,
    output_step_tokens=4,
)

MOST_STEPS = 1000


class House:
    """Pages of 4 tokens if not told otherwise; a state image takes 2 units of host memory."""

    def __init__(
        self, pages=100, spare_slots=6, has_state=True, host_units=0, prefix_reuse=True, page_size=4, **limits
    ):
        limits = replace(LIMITS, **limits)
        slots = (limits.max_concurrency + spare_slots) * has_state
        self.cache = ContextCache(
            CacheOptions(
                page_size, pages, slots, has_state, prefix_reuse, host_units=host_units, host_units_per_state=2
            )
        )
        self.scheduler = Scheduler(limits, self.cache)
        self.device = FakeDevice(self.cache)
        self.requests: dict[str, GenerationRequest] = {}
        self.outputs: dict[str, list[int]] = {}
        self.ended: dict[str, TokenOutcome] = {}
        self.copy_seconds = 0.0
        self.step_seconds = 0.0
        """Of a step from its plan to its end; one second more goes by before the next."""
        self.now = 0.0

    def submit(self, name, prompt, max_tokens=1, namespace="", frontiers=()):
        sampling = SamplingParams(seed=0, max_tokens=max_tokens)
        request = GenerationRequest(name, tuple(prompt), sampling, namespace, frontiers)
        self.requests[name], self.outputs[name] = request, []
        self.scheduler.submit(request, self.now)

    def plan(self) -> StepPlan | None:
        return self.scheduler.plan(self.now)

    def step(self, *, copies_fail=False) -> StepPlan | None:
        plan = self.plan()
        if plan is not None:
            self.take_in(plan, copies_fail=copies_fail)
        return plan

    def take_in(self, plan: StepPlan, *, copies_fail=False) -> None:
        failing = [batch.number for batch in plan.background if copies_fail]
        copied = self.device.run(plan, self.tokens_of, failing=failing, seconds=self.copy_seconds)
        picked = {each.request_id: 1000 + each.end for each in plan.segments if each.is_sampled}
        resume_seconds = 0.25 if plan.resumes else 0.0
        result = StepResult(picked, resume_seconds=resume_seconds, copied=copied, under_way=self.device.under_way)
        self.now += self.step_seconds
        for outcome in self.scheduler.apply(plan, result, self.now):
            name = outcome.sequence.request_id
            self.outputs[name].append(outcome.token_id)
            if outcome.finish_reason is not None:
                self.ended[name] = outcome
        self.now += 1.0
        assert self.scheduler.check() == []

    def tokens_of(self, name) -> tuple[int, ...]:
        return (*self.requests[name].prompt_token_ids, *self.outputs[name])

    def run(self, name, prompt, **options) -> list[StepPlan]:
        """Serve one request, and whatever else is to be done, to the end."""
        self.submit(name, prompt, **options)
        return self.run_on()

    def run_on(self) -> list[StepPlan]:
        plans: list[StepPlan] = []
        while (plan := self.step()) is not None:
            plans.append(plan)
            assert len(plans) < MOST_STEPS, "it never comes to rest"
        return plans

    def reuse(self, name):
        """How the request that has ended was served."""
        return self.ended[name].sequence.reuse

    def held(self) -> list[int]:
        """Units that requests and copies hold."""
        pools = (self.cache.pages, self.cache.slots, self.cache.host)
        return [count for pool in pools for count in (pool.counts().pinned, pool.counts().in_flight)]
