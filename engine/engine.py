"""The engine's front: load a model, submit requests, watch, drain and stop."""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from cache import (
    AuditReport,
    CacheOptions,
    CacheStats,
    Census,
    ContextCache,
    Fault,
    RequestLease,
    Tier,
    host_state_counts,
    take_census,
)
from engine.administration import EntryAges, TierReset, reset_cache
from engine.copies import no_transfers
from engine.errors import EngineUnavailableError, RequestError
from engine.events import CacheReset, Observer, ReuseDecided
from engine.limits import SchedulerLimits
from engine.loading import EngineParts, load_parts
from engine.loop import EngineLoop
from engine.options import EngineOptions
from engine.request import Delta, FinishReason, GenerationRequest, SamplingParams, Timings, TokenLogprob, Usage
from engine.scheduler import Scheduler
from engine.sequence import SequenceState
from engine.snapshot import EngineSnapshot, EngineStatus
from engine.stream import Generation

__all__ = [
    "Delta",
    "Engine",
    "EngineOptions",
    "EngineSnapshot",
    "EngineStatus",
    "FinishReason",
    "Generation",
    "GenerationRequest",
    "SamplingParams",
    "Timings",
    "TokenLogprob",
    "Usage",
]

Result = TypeVar("Result")


class Engine:
    """One model, ready to answer. Mutable: every method but `load` belongs to one event loop's thread."""

    def __init__(self, parts: EngineParts, options: EngineOptions, model_folder: Path) -> None:
        """`load` makes the parts."""
        self.config = parts.config
        self.options = options
        self.tokenizer = parts.tokenizer
        self.chat_template = parts.chat_template
        """None where the checkpoint has none; chat requests then get an error."""
        self.chat_encoder = parts.chat_encoder
        """Of what the template writes."""
        self.memory = parts.memory
        self.max_context_tokens = parts.memory.max_context_tokens
        """Most tokens that prompt and output may have together."""
        self.page_size = parts.memory.page_size
        """Tokens of a KV page."""
        self.backend_name = parts.runner.backend_name
        self.is_on_cpu = parts.runner.is_on_cpu
        """Whether the model is computed on the CPU."""
        self.kernel_choices = parts.kernel_choices
        """What serves each kernel, and why where it is not the first choice."""
        self.model_folder = model_folder
        self._faults = parts.faults
        self._status = EngineStatus.STARTING
        self._cache_stats = CacheStats()
        self._transfers = no_transfers()
        self._clock = time.monotonic
        self._ages = EntryAges(self._clock)
        self._loop = EngineLoop(self._new_scheduler, parts.runner, parts.tokenizer.new_detokenizer, self._clock)
        self._task: asyncio.Task[None] | None = None
        self._trials = 0

    @classmethod
    def load(cls, folder: Path, options: EngineOptions | None = None) -> Engine:
        """Read a checkpoint in Hugging Face layout and allocate its memory. Blocking: call it in a thread.

        Raises ModelLoadError, ChatTemplateError or InsufficientMemoryError.
        """
        options = options or EngineOptions()
        return cls(load_parts(folder, options), options, folder)

    @property
    def status(self) -> EngineStatus:
        """STOPPED also when the loop's task has died, which it never should."""
        if self._task is not None and self._task.done():
            return EngineStatus.STOPPED
        return self._status

    async def start(self) -> None:
        """Start the loop's task. Call it once, in the event loop from which requests will be submitted."""
        if self._task is not None:
            raise ValueError("the engine was started already")
        self._task = asyncio.create_task(self._loop.run(), name="dalsegno-engine-loop")
        self._status = EngineStatus.RUNNING

    def submit(self, request: GenerationRequest) -> Generation:
        """Queue a request; iterate the result for its deltas.

        Raises ContextLengthExceededError, ServerOverloadedError, EngineUnavailableError or (for a token that the model
        does not have) RequestError at once; QueueTimeoutError and EngineUnavailableError can also come out of the
        iteration. `max_tokens` is clamped to what the context leaves.
        """
        if self.status is not EngineStatus.RUNNING:
            raise EngineUnavailableError(f"the engine is {self.status}; send the request again later")
        params = request.sampling
        self._check_token_ids("prompt", request.prompt_token_ids)
        self._check_token_ids("stop_token_ids", params.stop_token_ids)
        self._check_token_ids("logit_bias", [token_id for token_id, _ in params.logit_bias])
        return self._loop.submit(request)

    def heartbeat_age_seconds(self) -> float:
        """Seconds since the loop last turned; it turns at least once a second, unless one step takes longer."""
        return self._loop.heartbeat_age_seconds

    @property
    def failures_since_token(self) -> int:
        """Steps that failed since one last gave a token."""
        return self._loop.failures_since_token

    async def try_step(self) -> None:
        """Ask for one token after one token. Raises what any request may raise: for whoever wants to know whether steps
        work again when nobody else asks."""
        self._trials += 1
        params = SamplingParams(max_tokens=1, temperature=0.0)
        trial = self.submit(GenerationRequest(f"trial-{self._trials}", (0,), params, namespace="trial"))
        try:
            async for _ in trial:
                pass
        finally:
            await trial.aclose()

    def snapshot(self) -> EngineSnapshot:
        """Counts at this moment."""
        loop, scheduler = self._loop, self._loop.scheduler
        cache = scheduler.cache
        states = [sequence.state for sequence in scheduler.running]
        return EngineSnapshot(
            status=self.status,
            heartbeat_age_seconds=loop.heartbeat_age_seconds,
            running=len(states),
            waiting=len(scheduler.waiting) + loop.inbox_size,
            restoring=states.count(SequenceState.RESTORING),
            prefilling=states.count(SequenceState.PREFILLING),
            decoding=states.count(SequenceState.DECODING),
            kv_pages=cache.pages.counts(),
            state_slots=cache.slots.counts(),
            host_units=cache.host.counts(),
            host_state_slots=host_state_counts(cache),
            cache=copy.deepcopy(self._cache_stats),
            transfers=copy.deepcopy(self._transfers),
            restore_bytes_per_second=cache.costs.restore_bytes_per_second,
            prefill_tokens_per_second=cache.costs.prefill_tokens_per_second,
            last_audit=loop.auditor.last,
            steps_total=loop.totals.steps,
            prefill_tokens_total=loop.totals.prefill_tokens,
            decode_tokens_total=loop.totals.decode_tokens,
            suspensions_total=loop.suspensions_total,
            recomputed_tokens_total=loop.recomputed_tokens_total,
            step_failures_total=loop.totals.step_failures,
            consecutive_step_failures=loop.consecutive_failures,
            loop_restarts_total=loop.totals.restarts,
            step_seconds=loop.totals.step_seconds,
            step_overhead_seconds=loop.totals.overhead_seconds,
            oldest_entry_seconds=self._ages.of(cache),
            faults=self.faults,
        )

    def census(self, most: int) -> Census:
        """Who lives in the cache, at most `most` of them by name."""
        return take_census(self._loop.scheduler.cache, self._clock(), most)

    def observe(self, observer: Observer | None) -> None:
        """Let `observer` know of everything that happens from now on; there is one at most, or None."""
        self._loop.observer = observer

    @property
    def faults(self) -> frozenset[Fault]:
        """Those of a fire drill that are on."""
        return self._faults.on

    def check(self) -> list[str]:
        """Violations of the ledger, one line each; empty when every unit is accounted for."""
        return self._loop.scheduler.check()

    async def reset_cache(self, tiers: Collection[Tier]) -> dict[Tier, TierReset]:
        """Forget what is remembered in these tiers, but for what is in use. Raises EngineUnavailableError when the
        engine has stopped."""
        found = await self._between_steps(partial(reset_cache, tiers=tiers))
        self._loop.tell(CacheReset(tuple(found)))
        return found

    async def audit_cache(self) -> AuditReport:
        """Like `check`, while requests run, and give back what nobody holds. Raises EngineUnavailableError when the
        engine has stopped."""
        return await self._between_steps(lambda _scheduler: self._loop.audit())

    async def set_faults(self, faults: frozenset[Fault]) -> None:
        """Switch on these faults and no other. Raises EngineUnavailableError when the engine has stopped."""
        await self._between_steps(lambda _scheduler: self._faults.switch(faults))

    async def drain(self, timeout_s: float | None = None) -> bool:
        """Take no more requests and wait until the accepted ones are done; False when the time ran out first."""
        if self._status is EngineStatus.RUNNING:
            self._status = EngineStatus.DRAINING
        try:
            async with asyncio.timeout(timeout_s):
                await self._loop.wait_until_empty()
        except TimeoutError:
            return False
        return True

    async def stop(self) -> None:
        """Fail what still runs with EngineUnavailableError, end the loop and its thread. Safe to call twice."""
        if self._status is EngineStatus.STOPPED:
            return
        self._status = EngineStatus.STOPPED
        await self._loop.stop(self._task)

    async def _between_steps(self, work: Callable[[Scheduler], Result]) -> Result:
        if self._task is None or self.status is EngineStatus.STOPPED:
            raise EngineUnavailableError("the engine does not run")
        return await self._loop.between_steps(work)

    def _tell_of_reuse(self, lease: RequestLease) -> None:
        self._loop.tell(ReuseDecided(lease.request_id, lease.namespace, lease.report))

    def _check_token_ids(self, param: str, token_ids: Sequence[int]) -> None:
        last = self.config.vocab_size - 1
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) <= last:
            raise RequestError(
                f"{param} has token ids {min(token_ids)} to {max(token_ids)}; the model's are 0 to {last}", param=param
            )

    def _new_scheduler(self) -> Scheduler:
        memory, options = self.memory, self.options
        limits = SchedulerLimits(
            max_concurrency=options.max_concurrency,
            max_pending_requests=options.max_pending_requests,
            pending_timeout_seconds=options.pending_timeout_s,
            max_context_tokens=memory.max_context_tokens,
            prefill_chunk=memory.prefill_chunk,
        )
        cache = ContextCache(
            CacheOptions(
                page_size=memory.page_size,
                kv_pages=memory.kv_pages,
                state_slots=memory.state_slots,
                has_state=self.config.gated_delta_net is not None,
                prefix_reuse=options.prefix_reuse,
                host_units=memory.host_units,
                host_units_per_state=memory.host_units_per_state,
                host_state_cap=memory.host_state_cap,
                page_bytes=memory.kv_page_bytes,
                state_bytes=memory.state_slot_bytes,
                self_heal=options.self_heal,
            ),
            self._cache_stats,
            self._faults,
            self._tell_of_reuse,
        )
        end_token_ids = set(self.config.eos_token_ids)
        if self.tokenizer.eos_token_id is not None:
            end_token_ids.add(self.tokenizer.eos_token_id)
        return Scheduler(limits, cache, end_token_ids, self._transfers)
