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
_HOST_SHARE_OF_RAM = 0.25
_HOST_SHARE_ON_CPU = 0.25
"""Of what is left after the KV pages: there the device is RAM too."""
_HOST_SHARE_ON_GPU = 0.5
"""Of the RAM that is available: it is locked, so the system cannot take it back."""
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

    def describe(self) -> str:
        """One line for the log."""
        return (
            f"memory: {self.kv_pages:,} KV pages of {self.page_size} tokens ({_mib(self.kv_bytes)}), "
            f"{self.state_slots} state slots ({_mib(self.state_bytes)}), step buffers {_mib(self.step_buffer_bytes)}, "
            f"of {_mib(self.available_bytes)} available; host memory {self._describe_host()}; "
            f"context {self.max_context_tokens:,} tokens, {self.describe_room()}"
        )

    def describe_room(self) -> str:
        """How many conversations fit, and where."""
        host = f" and {self.host_full_contexts:,} in host memory" if self.host_units else ""
        return f"{self.full_contexts:,} full conversations fit on the device{host}"

    def _describe_host(self) -> str:
        if not self.host_units:
            return "off"
        units = f"{self.host_units:,} units ({_mib(self.host_bytes)})"
        return f"{units}, {self.host_units_per_state:,} for a state" if self.state_slot_bytes else units


@dataclass(frozen=True, slots=True)
class Ram:
    """The machine's memory, in bytes: all of it, and what can be allocated now."""

    total_bytes: int
    available_bytes: int


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
    the same. `element_bytes` is that of the kernels' dtype.

    Raises InsufficientMemoryError, which names the flag, for what was asked for and does not fit, and
    UnusableOptionError for a context longer than the model's, or for host memory in which nothing fits.
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
    units_per_state = max(1, -(-slot_bytes // page_bytes))
    least_units = units_per_state + 1 if slot_bytes else 1
    room = left - pages * page_bytes if on_cpu else ram.available_bytes
    host_bytes = _host_bytes(options, room, ram, _HOST_SHARE_ON_CPU if on_cpu else _HOST_SHARE_ON_GPU)
    host_units = _host_units(options, host_bytes, page_bytes, least_units)
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
        host_units=host_units,
        host_units_per_state=units_per_state,
        host_state_cap=options.host_state_slots,
    )


def system_ram() -> Ram:
    """This machine's, or what the cgroups leave of it."""
    limits = cgroup_limits(_CGROUP_ROOT, _own_cgroup())
    total = min([int(psutil.virtual_memory().total), *limits])
    return Ram(total, available_memory_bytes(torch.device("cpu")))


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


def _host_bytes(options: EngineOptions, room_bytes: int, ram: Ram, share: float) -> int:
    if not options.prefix_reuse:
        return 0
    if options.host_cache_mib is None:
        return min(int(ram.total_bytes * _HOST_SHARE_OF_RAM), int(room_bytes * share))
    if options.host_cache_mib * _MIB > room_bytes:
        purpose = f"a host cache of {options.host_cache_mib:,} MiB"
        raise InsufficientMemoryError("--host-cache-mib", options.host_cache_mib * _MIB, room_bytes, purpose)
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
    """Bytes left in each memory cgroup that has a limit.

    Page cache that the kernel can drop counts as left: a mapped checkpoint is mostly that.
    """
    found: list[int] = []
    for group in _limited_cgroups(root, own):
        droppable = int(group.stat[group.stat.index(group.droppable) + 1]) if group.droppable in group.stat else 0
        found.append(max(0, group.limit_bytes - group.usage_bytes + droppable))
    return found


def cgroup_limits(root: Path, own: str) -> list[int]:
    """The limit of each memory cgroup that has one, in bytes."""
    return [group.limit_bytes for group in _limited_cgroups(root, own)]


@dataclass(frozen=True, slots=True)
class _Cgroup:
    limit_bytes: int
    usage_bytes: int
    stat: list[str]
    droppable: str
    """The name, in `stat`, of what the kernel can drop."""


def _limited_cgroups(root: Path, own: str) -> list[_Cgroup]:
    """Of version 2 from `own` up to the root, of version 1 the container's."""
    parts = [part for part in own.split("/") if part]
    folders = [root.joinpath(*parts[:depth]) for depth in range(len(parts) + 1)]
    found = [_limited_cgroup(folder, "memory.max", "memory.current", "inactive_file") for folder in folders]
    version_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    found.append(_limited_cgroup(root / "memory", *version_1))
    return [group for group in found if group is not None]


def _limited_cgroup(folder: Path, limit_name: str, usage_name: str, droppable: str) -> _Cgroup | None:
    limit, usage = _read_words(folder / limit_name), _read_words(folder / usage_name)
    if not limit or not usage or not limit[0].isdecimal():
        return None
    return _Cgroup(int(limit[0]), int(usage[0]), _read_words(folder / "memory.stat"), droppable)


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
