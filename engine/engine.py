"""The engine's front: load a model, submit requests, watch, drain and stop."""

from __future__ import annotations

import asyncio
import copy
import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from cache import (
    AuditReport,
    CacheOptions,
    CacheStats,
    Census,
    ContextCache,
    Fault,
    Faults,
    RequestLease,
    Tier,
    host_state_counts,
    take_census,
)
from engine.administration import EntryAges, TierReset, reset_cache
from engine.copies import no_transfers
from engine.errors import EngineUnavailableError, InsufficientMemoryError, RequestError
from engine.events import CacheReset, Observer, ReuseDecided
from engine.kernels import KernelChoice
from engine.kernels.select import select_kernels
from engine.limits import SchedulerLimits
from engine.loop import EngineLoop
from engine.memory import MemoryPlan, available_memory_bytes, plan_memory, system_ram
from engine.models.config import ModelConfig
from engine.models.registry import load_model, read_config
from engine.options import EngineOptions
from engine.request import Delta, FinishReason, GenerationRequest, SamplingParams, Timings, TokenLogprob, Usage
from engine.runner import Runner
from engine.scheduler import Scheduler
from engine.sequence import SequenceState
from engine.snapshot import EngineSnapshot, EngineStatus
from engine.storage import Storage, allocate_host_memory, allocate_state
from engine.stream import Generation
from engine.text.chat_template import ChatTemplate
from engine.text.tokenizer import Tokenizer

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

logger = logging.getLogger("dalsegno.engine")


class Engine:
    """One model, ready to answer. Mutable: every method but `load` belongs to one event loop's thread."""

    def __init__(
        self,
        *,
        config: ModelConfig,
        options: EngineOptions,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate | None,
        memory: MemoryPlan,
        runner: Runner,
        model_folder: Path,
        kernel_choices: tuple[KernelChoice, ...] = (),
        faults: Faults | None = None,
    ) -> None:
        """Parts that are ready; `load` makes them. `faults` are those that `runner` asks."""
        self.config = config
        self.options = options
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        """None where the checkpoint has none; chat requests then get an error."""
        self.memory = memory
        self.max_context_tokens = memory.max_context_tokens
        """Most tokens that prompt and output may have together."""
        self.page_size = memory.page_size
        """Tokens of a KV page."""
        self.backend_name = runner.backend_name
        self.model_folder = model_folder
        self.kernel_choices = kernel_choices
        """What serves each kernel, and why where it is not the first choice."""
        self._faults = Faults() if faults is None else faults
        self._status = EngineStatus.STARTING
        self._cache_stats = CacheStats()
        self._transfers = no_transfers()
        self._clock = time.monotonic
        self._ages = EntryAges(self._clock)
        self._loop = EngineLoop(self._new_scheduler, runner, tokenizer.new_detokenizer, self._clock)
        self._task: asyncio.Task[None] | None = None

    @classmethod
    def load(cls, folder: Path, options: EngineOptions | None = None) -> Engine:
        """Read a checkpoint in Hugging Face layout and allocate its memory. Blocking: call it in a thread.

        Raises ModelLoadError, ChatTemplateError or InsufficientMemoryError.
        """
        options = options or EngineOptions()
        config = read_config(folder)
        tokenizer = Tokenizer.load(folder)
        chat_template = ChatTemplate.load(folder)
        kernels = select_kernels(options.backend)
        element_bytes = kernels.dtype.itemsize
        device_type = kernels.device.type
        room = available_memory_bytes(kernels.device) - _checkpoint_bytes(folder)
        plan_memory(
            config, options, max(room, 0), element_bytes=element_bytes, device_type=device_type, ram=system_ram()
        )
        with _telling_of_memory("what else uses memory here", _checkpoint_bytes(folder), "the weights' checkpoint"):
            model = load_model(folder, kernels)
        room = available_memory_bytes(kernels.device)
        memory = plan_memory(
            config, options, room, element_bytes=element_bytes, device_type=device_type, ram=system_ram()
        )
        logger.info(memory.describe())
        with _telling_of_memory("--kv-cache-mib", memory.kv_bytes + memory.state_bytes, "the KV cache with the states"):
            state = allocate_state(
                config,
                num_pages=memory.kv_pages,
                page_size=memory.page_size,
                num_slots=memory.state_slots,
                dtype=kernels.dtype,
                device=kernels.device,
            )
        with _telling_of_memory("--host-cache-mib", memory.host_bytes, "the host cache"):
            host = allocate_host_memory(memory.host_units, memory.host_unit_bytes, kernels.device)
        faults = Faults()
        return cls(
            config=config,
            options=options,
            tokenizer=tokenizer.limited_to(memory.max_context_tokens),
            chat_template=chat_template,
            memory=memory,
            runner=Runner(model, kernels, Storage(state, host), memory.page_size, faults),
            model_folder=folder,
            kernel_choices=kernels.choices,
            faults=faults,
        )

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
            step_failures_total=loop.totals.step_failures,
            consecutive_step_failures=loop.consecutive_failures,
            loop_restarts_total=loop.totals.restarts,
            step_seconds=loop.totals.step_seconds,
            step_overhead_seconds=loop.totals.overhead_seconds,
            oldest_entry_seconds=self._ages.of(cache),
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


@contextmanager
def _telling_of_memory(flag: str, needed_bytes: int, purpose: str) -> Iterator[None]:
    """What the plan took for granted and the system refused, e.g. under another process's pressure."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "allocate" not in str(error):
            raise
        available = available_memory_bytes(torch.device("cpu"))
        raise InsufficientMemoryError(flag, needed_bytes, available, purpose) from error


def _checkpoint_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))
