"""How much memory this machine has: its RAM, within the limits of the cgroups, and what its GPU can still give."""

from __future__ import annotations

import resource
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

_CGROUP_ROOT = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Ram:
    """The machine's memory, in bytes: all of it, and what can be allocated now."""

    total_bytes: int
    available_bytes: int


def system_ram() -> Ram:
    """This machine's, or what the cgroups leave of it."""
    limits = cgroup_limits(_CGROUP_ROOT, _own_cgroup())
    total = min([int(psutil.virtual_memory().total), *limits])
    return Ram(total, available_memory_bytes(torch.device("cpu")))


def available_memory_bytes(device: torch.device) -> int:
    """Bytes that can be allocated now: CUDA's free memory, or the system's within the limits of the cgroups."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what loading a model left in torch's own cache can be allocated too
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
