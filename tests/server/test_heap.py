"""Memory that a large body took is given back."""

import asyncio
import ctypes

import psutil
import pytest

import server.daemon
from server.heap import LARGE_BYTES, give_back


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="only glibc keeps what others give back")
def test_what_is_free_between_pieces_in_use_is_given_back():
    process = psutil.Process()
    pieces = [bytearray(2000) for _ in range(50_000)]
    kept = pieces[::50]
    del pieces
    before = process.memory_info().rss
    give_back()
    assert before - process.memory_info().rss > 30 * 2**20
    assert len(kept) == 1000


@pytest.mark.anyio
async def test_memory_is_given_back_behind_a_large_body_and_no_other(client, monkeypatch):
    given = asyncio.Event()
    loop = asyncio.get_running_loop()

    def spy():
        give_back()
        loop.call_soon_threadsafe(given.set)

    monkeypatch.setattr(server.daemon, "give_back", spy)
    daemon = client._transport.app.state.daemon
    await client.post("/tokenize", json={"prompt": "a" * 1000})
    assert not daemon._has_memory_to_give_back
    await client.post("/tokenize", json={"prompt": "a " * LARGE_BYTES})
    await given.wait()
    assert not daemon._has_memory_to_give_back
