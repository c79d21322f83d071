"""Host memory is locked chunk by chunk, given back when it is gone, and an error says what was there."""

import mmap

import pytest
import torch

from engine.errors import InsufficientMemoryError
from engine.locked_memory import allocate_locked

PAGE = mmap.PAGESIZE


class Locks:
    """Ranges that are locked; the call of number `refused` fails."""

    def __init__(self, refused=None):
        self.refused = refused
        self.calls = 0
        self.sizes: dict[int, int] = {}

    def lock(self, address, size_bytes):
        self.calls += 1
        if self.calls == self.refused:
            return "out of memory"
        end = address + size_bytes
        assert all(end <= other or other + size <= address for other, size in self.sizes.items()), "locked already"
        self.sizes[address] = size_bytes
        return None

    def unlock(self, address):
        del self.sizes[address]


@pytest.mark.parametrize(
    ("units", "unit_bytes", "chunk_bytes", "chunks"),
    [
        (8, PAGE, 4 * PAGE, [4, 4]),
        (9, PAGE, 4 * PAGE, [4, 4, 1]),
        (3, 3 * PAGE, 7 * PAGE, [6, 3]),
        (3, 3 * PAGE, PAGE, [3, 3, 3]),
        (4, PAGE // 2, PAGE, [1, 1]),
        (3, PAGE // 2, PAGE, [1, 1]),
        (6, PAGE + PAGE // 2, 4 * PAGE, [3, 3, 3]),
        (2, PAGE + 1, PAGE, [3]),
        (1, 5, 2**30, [1]),
        (0, PAGE, PAGE, []),
    ],
)
def test_chunks_are_of_whole_units_and_whole_pages(units, unit_bytes, chunk_bytes, chunks):
    locks = Locks()
    memory = allocate_locked(units, unit_bytes, locks, chunk_bytes)
    assert memory.shape == (units, unit_bytes)
    assert not memory.any()
    assert [size // PAGE for size in locks.sizes.values()] == chunks
    assert all(address % PAGE == 0 for address in locks.sizes)
    for unit in memory:
        first, end = unit.ctypes.data, unit.ctypes.data + len(unit)
        assert any(start <= first and end <= start + size for start, size in locks.sizes.items())


def test_memory_stays_locked_as_long_as_anybody_sees_it():
    locks = Locks()
    memory = allocate_locked(4, PAGE, locks, PAGE)
    view = torch.from_numpy(memory)[2]
    del memory
    assert len(locks.sizes) == 4
    del view
    assert not locks.sizes


def test_a_chunk_that_is_refused_gives_back_the_others_and_says_what_is_needed_and_what_is_there():
    locks = Locks(refused=3)
    with pytest.raises(InsufficientMemoryError) as caught:
        allocate_locked(10, PAGE, locks, 2 * PAGE)
    assert not locks.sizes
    error = caught.value
    assert (error.flag, error.needed_bytes, error.available_bytes) == ("--host-cache-mib", 10 * PAGE, 4 * PAGE)
    assert "the host cache (out of memory; " in str(error)
    assert "bytes of RAM are available here, of which `ulimit -l` lets a process lock " in str(error)


def test_progress_is_told(caplog):
    with caplog.at_level("INFO", "dalsegno.progress"):
        allocate_locked(4, PAGE, Locks(), PAGE)
    assert f"locking host memory: {4 * PAGE} of {4 * PAGE} bytes" in caplog.messages[-1]
