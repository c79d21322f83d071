"""Host memory that is locked in place, chunk by chunk, so that a GPU copies to and from it beside its other work."""

from __future__ import annotations

import math
import mmap
import resource
import weakref
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from engine.errors import InsufficientMemoryError
from engine.progress import track
from engine.system_memory import available_memory_bytes

CHUNK_BYTES = 2**30
"""About what is locked in one call: a call for all of it may be refused, and nothing is heard of it for minutes."""
FLAG = "--host-cache-mib"


class PageLock(Protocol):
    """Locks ranges of host memory, for one GPU or more."""

    def lock(self, address: int, size_bytes: int) -> str | None:
        """What went wrong; None when it is locked."""
        ...

    def unlock(self, address: int) -> None:
        """Undo the `lock` of that address, once nothing is copied there any more."""
        ...


def allocate_locked(
    units: int, unit_bytes: int, page_lock: PageLock, chunk_bytes: int = CHUNK_BYTES
) -> npt.NDArray[np.uint8]:
    """Zeros [units, unit_bytes], locked until the array and every view of it are gone.

    A chunk holds whole units, for a copy must not cross from one locked range into another (CUDA refuses it as an
    invalid argument), and whole pages of the system, which are what is locked. Raises InsufficientMemoryError, with
    nothing locked, when the system refuses a chunk.
    """
    total = units * unit_bytes
    step = math.lcm(unit_bytes, mmap.PAGESIZE)
    step *= max(1, chunk_bytes // step)
    # One page more than needed, to begin where a page begins.
    room = np.zeros(_whole_pages(total) + mmap.PAGESIZE, np.uint8)
    start = -room.ctypes.data % mmap.PAGESIZE
    address = room.ctypes.data + start
    locked: list[int] = []
    with track("locking host memory", total) as advance:
        for offset in range(0, total, step):
            size = min(step, total - offset)
            error = page_lock.lock(address + offset, _whole_pages(size))
            if error is not None:
                _unlock(page_lock, locked)
                raise _refused(total, offset, error)
            locked.append(address + offset)
            advance(size)
    # The memory itself is watched, not a view of it, which may go before others do.
    weakref.finalize(room, _unlock, page_lock, locked).atexit = False
    return room[start : start + total].reshape(units, unit_bytes)


def _unlock(page_lock: PageLock, addresses: list[int]) -> None:
    for address in reversed(addresses):
        page_lock.unlock(address)


def _whole_pages(size_bytes: int) -> int:
    return -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _refused(total: int, locked_bytes: int, error: str) -> InsufficientMemoryError:
    limit, _hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    allowed = "any number of" if limit == resource.RLIM_INFINITY else f"{limit:,}"
    ram = available_memory_bytes(torch.device("cpu"))
    purpose = (
        f"the host cache ({error}; {ram:,} bytes of RAM are available here, of which `ulimit -l` lets a process lock "
        f"{allowed} bytes)"
    )
    return InsufficientMemoryError(FLAG, total, locked_bytes, purpose)


class CudaLock:
    """By CUDA's cudaHostRegister."""

    def lock(self, address: int, size_bytes: int) -> str | None:
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        error = runtime.cudaHostRegister(address, size_bytes, 0)
        return str(runtime.cudaGetErrorString(error)) if int(error) else None

    def unlock(self, address: int) -> None:
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
