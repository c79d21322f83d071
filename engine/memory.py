"""How the memory that there is gets divided: the steps' own needs, KV pages, state slots, host memory."""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import InsufficientMemoryError, UnusableOptionError
from engine.models.config import ModelConfig
from engine.options import EngineOptions
from engine.step_memory import Part, step_parts
from engine.system_memory import Ram, available_memory_bytes, cgroup_headrooms, cgroup_limits, system_ram

__all__ = [
    "MemoryPlan",
    "Part",
    "Ram",
    "available_memory_bytes",
    "cgroup_headrooms",
    "cgroup_limits",
    "plan_memory",
    "system_ram",
]

_MIB = 1024 * 1024
_KV_SHARE_ON_CPU = 0.4
"""Of what is left after the state slots and the step's own buffers; the rest is for the host cache and the system."""
_HOST_SHARE_OF_RAM = 0.25
_HOST_SHARE_ON_CPU = 0.25
"""Of what is left after the KV pages: there the device is RAM too."""
_HOST_SHARE_ON_GPU = 0.5
"""Of the RAM that is available: it is locked, so the system cannot take it back."""
_MAX_FULL_CONTEXTS_PER_SEAT = 4
LEAST_CHECKPOINT_SLOTS = 16
"""State slots beyond the running requests', where nobody says."""
TOKENS_PER_CHECKPOINT = 8192
"""Of KV pages, for each state slot beyond the running requests', on a GPU. See docs/memory.md for how it was found."""
LEAST_CONTEXT_TOKENS = 256
"""A shorter context is served to those alone who ask for it: not even a greeting with its answer is sure to fit."""
MAX_AUTOMATIC_PAGES = 2**18
"""The cache keeps a record of each page in Python; models for which more would fit are small enough without."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Sizes that fit; bytes unless the name says otherwise."""

    page_size: int
    kv_pages: int
    kv_page_bytes: int
    kv_element_bytes: int
    state_slots: int
    state_slot_bytes: int
    running_slots: int
    """Of the state slots, those that the running requests have for sure."""
    step_parts: tuple[Part, ...]
    """What the steps take besides."""
    max_context_tokens: int
    prefill_chunk: int
    available_bytes: int
    """What there was to divide, beside the weights."""
    host_units: int
    """Units of host memory, each of `kv_page_bytes`; 0 where nothing is kept there."""
    host_units_per_state: int
    """Units that a state image takes; 1 for a model without states."""
    host_state_cap: int | None
    """Most state images in host memory, where it is less than what fits."""

    @property
    def host_unit_bytes(self) -> int:
        return self.kv_page_bytes

    @property
    def host_bytes(self) -> int:
        return self.host_units * self.host_unit_bytes

    @property
    def kv_bytes(self) -> int:
        return self.kv_pages * self.kv_page_bytes

    @property
    def state_bytes(self) -> int:
        return self.state_slots * self.state_slot_bytes

    @property
    def step_buffer_bytes(self) -> int:
        return sum(part.nbytes for part in self.step_parts)

    @property
    def left_bytes(self) -> int:
        """What is given to nothing on the device."""
        return self.available_bytes - self.step_buffer_bytes - self.kv_bytes - self.state_bytes

    @property
    def full_contexts(self) -> int:
        """How many conversations of the full context fit on the device, by pages and, if it has them, by states."""
        by_pages = self.kv_pages // self._pages_of_full_context
        return min(by_pages, self.state_slots) if self.state_slot_bytes else by_pages

    @property
    def host_full_contexts(self) -> int:
        """How many of them fit in host memory, with one state image each."""
        if not self.state_slot_bytes:
            return self.host_units // self._pages_of_full_context
        by_bytes = self.host_units // (self._pages_of_full_context + self.host_units_per_state)
        return min([by_bytes, *([] if self.host_state_cap is None else [self.host_state_cap])])

    @property
    def _pages_of_full_context(self) -> int:
        return -(-self.max_context_tokens // self.page_size)

    def parts(self) -> tuple[Part, ...]:
        """Everything on the device beside the weights, line by line; their sum is `available_bytes`."""
        tokens = self.kv_pages * self.page_size
        kv = f"{self.kv_pages:,} pages of {self.page_size} tokens at {self.kv_page_bytes:,} bytes: {tokens:,} tokens"
        checkpoints = self.state_slots - self.running_slots
        states = (
            f"{self.state_slots:,} images of {self.state_slot_bytes:,} bytes: {self.running_slots:,} for running "
            f"requests, {checkpoints:,} for checkpoints"
        )
        return (
            *self.step_parts,
            Part("KV pages", self.kv_bytes, kv, "--kv-pages"),
            Part("state slots", self.state_bytes, states, "--device-state-slots"),
            Part("left over", self.left_bytes, "less than a page, or not asked for"),
        )

    def describe(self) -> str:
        """One line for the log."""
        return (
            f"memory: {self.kv_pages:,} KV pages of {self.page_size} tokens ({_mib(self.kv_bytes)}), "
            f"{self.state_slots} state slots ({_mib(self.state_bytes)}), step buffers {_mib(self.step_buffer_bytes)}, "
            f"of {_mib(self.available_bytes)} available; host memory {self.describe_host()}; "
            f"context {self.max_context_tokens:,} tokens, {self.describe_room()}"
        )

    def describe_room(self) -> str:
        """How many conversations fit, and where."""
        host = f" and {self.host_full_contexts:,} in host memory" if self.host_units else ""
        return f"{self.full_contexts:,} full conversations fit on the device{host}"

    def describe_host(self) -> str:
        if not self.host_units:
            return "off"
        units = f"{self.host_units:,} units ({_mib(self.host_bytes)})"
        return f"{units}, {self.host_units_per_state:,} for a state" if self.state_slot_bytes else units


def plan_memory(
    config: ModelConfig,
    options: EngineOptions,
    available_bytes: int,
    *,
    element_bytes: int,
    device_type: str = "cpu",
    ram: Ram,
) -> MemoryPlan:
    """Divide `available_bytes` of the device, what there is beside the weights; on the CPU the host cache comes out of
    the same. `element_bytes` is that of the kernels' dtype; KV pages have their own where the options say so.

    Raises InsufficientMemoryError, which names the flag, for what was asked for and does not fit, and
    UnusableOptionError for a context longer than the model's, or for host memory in which nothing fits.
    """
    on_cpu = device_type == "cpu"
    page_size = options.page_size or (16 if on_cpu else 64)
    chunk = options.prefill_chunk or (512 if on_cpu else 2048)
    kv_element_bytes = 1 if options.kv_cache_dtype == "fp8" else element_bytes
    page_bytes = max(1, page_size * config.kv_bytes_per_token(kv_element_bytes))
    slot_bytes = config.state_image_bytes(element_bytes)
    context = options.max_context or config.max_position_embeddings
    if context > config.max_position_embeddings:
        raise UnusableOptionError(
            f"--max-context is {context}, but the model has {config.max_position_embeddings} positions; lower it"
        )
    steps = step_parts(config, chunk, options.max_concurrency, on_gpu=not on_cpu, available_bytes=available_bytes)
    left = _without(steps, available_bytes, chunk)
    _require_slots(options, slot_bytes, left)
    divide = _Division(options, left, page_size, page_bytes, slot_bytes)
    pages_per_context = -(-context // page_size)
    pages, slots = divide.for_cpu(pages_per_context) if on_cpu else divide.for_gpu()
    if options.max_context is None:
        context = min(context, pages * page_size)
    _require_context(options, context, config.max_position_embeddings, pages, page_size, page_bytes)
    left -= pages * page_bytes + slots * slot_bytes
    units_per_state = max(1, -(-slot_bytes // page_bytes))
    least_units = units_per_state + 1 if slot_bytes else 1
    room = left if on_cpu else ram.available_bytes
    host_bytes = _host_bytes(options, room, ram, _HOST_SHARE_ON_CPU if on_cpu else _HOST_SHARE_ON_GPU)
    return MemoryPlan(
        page_size=page_size,
        kv_pages=pages,
        kv_page_bytes=page_bytes,
        kv_element_bytes=kv_element_bytes,
        state_slots=slots,
        state_slot_bytes=slot_bytes,
        running_slots=options.max_concurrency,
        step_parts=steps,
        max_context_tokens=context,
        prefill_chunk=chunk,
        available_bytes=available_bytes,
        host_units=_host_units(options, host_bytes, page_bytes, least_units),
        host_units_per_state=units_per_state,
        host_state_cap=options.host_state_slots,
    )


def _without(parts: tuple[Part, ...], available_bytes: int, chunk: int) -> int:
    """What the parts leave. Raises InsufficientMemoryError with the flag of the first that does not fit."""
    left = available_bytes
    for part in parts:
        if part.nbytes > left:
            flag = part.flag or "the model's size"
            purpose = f"a prefill of {chunk} tokens" if flag == "--prefill-chunk" else f"{part.name}: {part.how}:"
            raise InsufficientMemoryError(flag, part.nbytes, left, f"{purpose} beside the weights")
        left -= part.nbytes
    return left


def _require_slots(options: EngineOptions, slot_bytes: int, left: int) -> None:
    """The running requests' slots and the least of the checkpoints' must fit."""
    slots = options.max_concurrency + _least_checkpoint_slots(options)
    if slots * slot_bytes > left:
        flag = "--device-state-slots" if options.max_concurrency * slot_bytes <= left else "--max-concurrency"
        raise InsufficientMemoryError(flag, slots * slot_bytes, left, f"the recurrent state of {slots} slots")


def _least_checkpoint_slots(options: EngineOptions) -> int:
    return LEAST_CHECKPOINT_SLOTS if options.device_state_slots is None else options.device_state_slots


@dataclass(frozen=True, slots=True)
class _Division:
    """Of `left` bytes between pages and slots."""

    options: EngineOptions
    left: int
    page_size: int
    page_bytes: int
    slot_bytes: int

    @property
    def least_slots(self) -> int:
        return self.options.max_concurrency + _least_checkpoint_slots(self.options)

    @property
    def left_for_pages(self) -> int:
        """Beside the least slots."""
        return self.left - self.least_slots * self.slot_bytes

    def for_cpu(self, pages_per_context: int) -> tuple[int, int]:
        """A few full contexts for each seat, or a share of what there is: the rest is the system's."""
        pages = self._asked_pages()
        if pages is None:
            wanted = self.options.max_concurrency * _MAX_FULL_CONTEXTS_PER_SEAT * pages_per_context
            pages = min(wanted, int(self.left_for_pages * _KV_SHARE_ON_CPU) // self.page_bytes)
        return pages, self.least_slots

    def for_gpu(self) -> tuple[int, int]:
        """All of it: a slot for every TOKENS_PER_CHECKPOINT of the pages, where neither is given."""
        pages, slots = self._asked_pages(), self.least_slots
        if self.options.device_state_slots is None and self.slot_bytes:
            slots = max(slots, self.options.max_concurrency + self._checkpoint_slots(pages))
        if pages is None:
            pages = min(MAX_AUTOMATIC_PAGES, (self.left - slots * self.slot_bytes) // self.page_bytes)
        return pages, slots

    def _checkpoint_slots(self, pages: int | None) -> int:
        """As many as go with `pages`, or with all the pages that fit beside them."""
        room = self.left - self.options.max_concurrency * self.slot_bytes
        if pages is None:
            each = TOKENS_PER_CHECKPOINT * self.page_bytes + self.page_size * self.slot_bytes
            return min(self.page_size * room // each, self._slots_of(MAX_AUTOMATIC_PAGES))
        return min((room - pages * self.page_bytes) // self.slot_bytes, self._slots_of(pages))

    def _slots_of(self, pages: int) -> int:
        return pages * self.page_size // TOKENS_PER_CHECKPOINT

    def _asked_pages(self) -> int | None:
        options, left = self.options, self.left_for_pages
        if options.kv_pages is not None:
            needed, purpose = options.kv_pages * self.page_bytes, f"the KV cache of {options.kv_pages} pages"
            if needed > left:
                raise InsufficientMemoryError("--kv-pages", needed, left, purpose, left // self.page_bytes)
            return options.kv_pages
        if options.kv_cache_mib is not None:
            needed = options.kv_cache_mib * _MIB
            if needed > left:
                raise InsufficientMemoryError("--kv-cache-mib", needed, left, "the KV cache", left // _MIB)
            return options.kv_cache_mib * _MIB // self.page_bytes
        return None


def _host_bytes(options: EngineOptions, room_bytes: int, ram: Ram, share: float) -> int:
    if not options.prefix_reuse:
        return 0
    if options.host_cache_mib is None:
        return min(int(ram.total_bytes * _HOST_SHARE_OF_RAM), int(room_bytes * share))
    if options.host_cache_mib * _MIB > room_bytes:
        purpose = f"a host cache of {options.host_cache_mib:,} MiB"
        needed = options.host_cache_mib * _MIB
        raise InsufficientMemoryError("--host-cache-mib", needed, room_bytes, purpose, room_bytes // _MIB)
    return options.host_cache_mib * _MIB


def _host_units(options: EngineOptions, host_bytes: int, unit_bytes: int, least_units: int) -> int:
    """Units in `host_bytes`; 0 where not even one checkpoint fits in what was found by itself."""
    units = host_bytes // unit_bytes
    if units >= least_units:
        return units
    if host_bytes and options.host_cache_mib is not None:
        raise UnusableOptionError(
            f"--host-cache-mib is {options.host_cache_mib}, but one checkpoint of this model takes "
            f"{-(-least_units * unit_bytes // _MIB):,} MiB; give at least that, or 0 to keep nothing in host memory"
        )
    return 0


def _require_context(
    options: EngineOptions, context: int, positions: int, pages: int, page_size: int, page_bytes: int
) -> None:
    """One full context must fit in the pages; one that nobody asked for is not shorter than is of use."""
    held = pages * page_size
    if options.max_context is not None:
        needed = -(-context // page_size)
        if needed > pages:
            purpose = f"one conversation of {context:,} tokens"
            raise InsufficientMemoryError("--max-context", needed * page_bytes, pages * page_bytes, purpose, held)
        return
    if pages == 0:
        raise InsufficientMemoryError("--page-size", page_bytes, 0, f"one KV page of {page_size} tokens")
    least = min(LEAST_CONTEXT_TOKENS, positions)
    needed = -(-least // page_size)
    if needed <= pages:
        return
    purpose = f"a context of {least} tokens, the least without --max-context,"
    if options.kv_pages is not None:
        raise UnusableOptionError(
            f"--kv-pages is {options.kv_pages} ({held} tokens); {purpose} needs {needed} pages; raise it"
        )
    if options.kv_cache_mib is not None:
        mib = -(-needed * page_bytes // _MIB)
        raise UnusableOptionError(
            f"--kv-cache-mib is {options.kv_cache_mib} ({held} tokens); {purpose} needs {mib} MiB; raise it"
        )
    raise InsufficientMemoryError("--max-context", needed * page_bytes, pages * page_bytes, purpose, held)


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / _MIB:,.0f} MiB"
