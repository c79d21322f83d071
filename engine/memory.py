"""How much memory there is, and how it is divided between KV pages and state slots."""

from __future__ import annotations

import resource
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from engine.errors import InsufficientMemoryError, UnusableOptionError
from engine.models.config import ModelConfig
from engine.options import EngineOptions

_MIB = 1024 * 1024
_KV_SHARE = 0.4
"""Of what is left after the state slots and the step's own buffers; the rest is for the host cache and the system."""
_MAX_FULL_CONTEXTS_PER_SEAT = 4
_CGROUP_ROOT = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Sizes that fit; bytes unless the name says otherwise."""

    page_size: int
    kv_pages: int
    kv_page_bytes: int
    state_slots: int
    state_slot_bytes: int
    step_buffer_bytes: int
    max_context_tokens: int
    prefill_chunk: int
    available_bytes: int

    @property
    def kv_bytes(self) -> int:
        return self.kv_pages * self.kv_page_bytes

    @property
    def state_bytes(self) -> int:
        return self.state_slots * self.state_slot_bytes

    @property
    def full_contexts(self) -> int:
        """How many conversations of the full context fit at once, by pages and, where the model has them, by states."""
        by_pages = self.kv_pages // -(-self.max_context_tokens // self.page_size)
        return min(by_pages, self.state_slots) if self.state_slot_bytes else by_pages

    def describe(self) -> str:
        """One line for the log."""
        return (
            f"memory: {self.kv_pages:,} KV pages of {self.page_size} tokens ({_mib(self.kv_bytes)}), "
            f"{self.state_slots} state slots ({_mib(self.state_bytes)}), step buffers {_mib(self.step_buffer_bytes)}, "
            f"of {_mib(self.available_bytes)} available; context {self.max_context_tokens:,} tokens, "
            f"{self.full_contexts} full conversations fit"
        )


def plan_memory(
    config: ModelConfig,
    options: EngineOptions,
    available_bytes: int,
    *,
    element_bytes: int,
    device_type: str = "cpu",
) -> MemoryPlan:
    """Divide `available_bytes`, what there is beside the weights. `element_bytes` is that of the kernels' dtype.

    Raises InsufficientMemoryError, which names the flag, for what was asked for and does not fit, and
    UnusableOptionError for a context longer than the model's.
    """
    on_cpu = device_type == "cpu"
    page_size = options.page_size or (16 if on_cpu else 64)
    chunk = options.prefill_chunk or (512 if on_cpu else 2048)
    page_bytes = max(1, page_size * config.kv_bytes_per_token(element_bytes))
    slots = options.max_concurrency + options.device_state_slots
    slot_bytes = config.state_image_bytes(element_bytes)
    buffers = _step_buffer_bytes(config, chunk, options.max_concurrency)
    if buffers > available_bytes:
        raise InsufficientMemoryError("--prefill-chunk", buffers, available_bytes, f"a prefill of {chunk} tokens")
    left = available_bytes - buffers
    if slots * slot_bytes > left:
        flag = "--device-state-slots" if options.max_concurrency * slot_bytes <= left else "--max-concurrency"
        raise InsufficientMemoryError(flag, slots * slot_bytes, left, f"the recurrent state of {slots} slots")
    left -= slots * slot_bytes
    context = options.max_context or config.max_position_embeddings
    if context > config.max_position_embeddings:
        raise UnusableOptionError(
            f"--max-context is {context}, but the model has {config.max_position_embeddings} positions; lower it"
        )
    pages = _kv_pages(options, left, page_bytes, pages_per_context=-(-context // page_size))
    if options.max_context is None:
        context = min(context, pages * page_size)
    _require_context(options, context, pages, page_size, page_bytes)
    return MemoryPlan(
        page_size=page_size,
        kv_pages=pages,
        kv_page_bytes=page_bytes,
        state_slots=slots,
        state_slot_bytes=slot_bytes,
        step_buffer_bytes=buffers,
        max_context_tokens=context,
        prefill_chunk=chunk,
        available_bytes=available_bytes,
    )


def available_memory_bytes(device: torch.device) -> int:
    """Bytes that can be allocated now: CUDA's free memory, or the system's within the limits of the cgroups."""
    if device.type == "cuda":
        free, _total = torch.cuda.mem_get_info(device)
        return int(free)
    available = int(psutil.virtual_memory().available)
    return min([available, *_address_space_headroom(), *cgroup_headrooms(_CGROUP_ROOT, _own_cgroup())])


def _address_space_headroom() -> list[int]:
    """What `ulimit -v` leaves, if it is set."""
    limit, _hard = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return []
    return [max(0, limit - int(psutil.Process().memory_info().vms))]


def _kv_pages(options: EngineOptions, left: int, page_bytes: int, pages_per_context: int) -> int:
    if options.kv_pages is not None:
        if options.kv_pages * page_bytes > left:
            raise InsufficientMemoryError(
                "--kv-pages", options.kv_pages * page_bytes, left, f"the KV cache of {options.kv_pages} pages"
            )
        return options.kv_pages
    if options.kv_cache_mib is not None:
        if options.kv_cache_mib * _MIB > left:
            raise InsufficientMemoryError("--kv-cache-mib", options.kv_cache_mib * _MIB, left, "the KV cache")
        return options.kv_cache_mib * _MIB // page_bytes
    wanted = options.max_concurrency * _MAX_FULL_CONTEXTS_PER_SEAT * pages_per_context
    return min(wanted, int(left * _KV_SHARE) // page_bytes)


def _require_context(options: EngineOptions, context: int, pages: int, page_size: int, page_bytes: int) -> None:
    """One full context must fit in the pages, and no context is shorter than two tokens."""
    needed = -(-max(context, 2) // page_size)
    if needed <= pages:
        return
    if options.max_context is not None:
        flag, purpose = "--max-context", f"one conversation of {context:,} tokens"
    else:
        flag, purpose = "--page-size", f"one KV page of {page_size} tokens"
    raise InsufficientMemoryError(flag, needed * page_bytes, pages * page_bytes, purpose)


def _step_buffer_bytes(config: ModelConfig, chunk: int, max_concurrency: int) -> int:
    """Activations of one step, roughly: the widest ones of a layer, and the logits, in float32."""
    rows = chunk + max_concurrency
    return 4 * (
        rows * (4 * config.intermediate_size + 8 * config.hidden_size) + 2 * max_concurrency * config.vocab_size
    )


def cgroup_headrooms(root: Path, own: str) -> list[int]:
    """Bytes left in each memory cgroup that has a limit: of version 2 from `own` up to the root, of version 1 the
    container's.

    Page cache that the kernel can drop counts as left: a mapped checkpoint is mostly that.
    """
    parts = [part for part in own.split("/") if part]
    folders = [root.joinpath(*parts[:depth]) for depth in range(len(parts) + 1)]
    found = [_headroom(folder, "memory.max", "memory.current", "inactive_file") for folder in folders]
    version_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    found.append(_headroom(root / "memory", *version_1))
    return [headroom for headroom in found if headroom is not None]


def _headroom(folder: Path, limit_name: str, usage_name: str, droppable_name: str) -> int | None:
    limit, usage = _read_words(folder / limit_name), _read_words(folder / usage_name)
    if not limit or not usage or not limit[0].isdecimal():
        return None
    stat = _read_words(folder / "memory.stat")
    droppable = int(stat[stat.index(droppable_name) + 1]) if droppable_name in stat else 0
    return max(0, int(limit[0]) - int(usage[0]) + droppable)


def _own_cgroup() -> str:
    """This process's path in the version 2 hierarchy; "" where there is none."""
    lines = _read_words(Path("/proc/self/cgroup"))
    return next((line.removeprefix("0::") for line in lines if line.startswith("0::")), "")


def _read_words(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii").split()
    except OSError:
        return []


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / _MIB:,.0f} MiB"
