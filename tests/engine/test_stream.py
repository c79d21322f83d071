"""The consumer's end of a request: nothing is lost, merged pieces stay in order, an error comes after the tokens."""

import asyncio

import pytest

from engine.errors import EngineUnavailableError
from engine.request import Delta, FinishReason, Timings, Usage
from engine.stream import Generation, Mailbox

pytestmark = pytest.mark.anyio
USAGE, TIMINGS = Usage(3, 2), Timings()


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.fixture
def mailbox():
    return Mailbox()


@pytest.fixture
def cancels():
    return []


@pytest.fixture
def generation(mailbox, cancels):
    return Generation("r", mailbox, lambda: cancels.append("r"))


async def test_pieces_come_as_they_are_put(mailbox, generation, cancels):
    mailbox.put("a", 1)
    first = await anext(generation)
    mailbox.put("b", 2)
    mailbox.finish(Delta("c", (), FinishReason.STOP, USAGE, TIMINGS))
    rest = [delta async for delta in generation]
    assert [(each.text, each.token_ids, each.finish_reason) for each in (first, *rest)] == [
        ("a", (1,), None),
        ("bc", (2,), FinishReason.STOP),
    ]
    assert (rest[-1].usage, rest[-1].timings, cancels) == (USAGE, TIMINGS, [])


async def test_what_was_not_taken_in_time_merges_into_one_piece(mailbox, generation):
    for token_id in range(100):
        mailbox.put(str(token_id), token_id)
    delta = await anext(generation)
    assert delta.token_ids == tuple(range(100))
    assert delta.text == "".join(map(str, range(100)))


async def test_a_consumer_waits_for_the_next_piece(mailbox, generation):
    waiting = asyncio.create_task(anext(generation))
    await asyncio.sleep(0)
    assert not waiting.done()
    mailbox.put("a", 1)
    assert (await waiting).text == "a"


async def test_an_error_comes_after_the_tokens_before_it(mailbox, generation, cancels):
    mailbox.put("a", 1)
    mailbox.fail(EngineUnavailableError("down"))
    assert (await anext(generation)).text == "a"
    with pytest.raises(EngineUnavailableError):
        await anext(generation)
    with pytest.raises(StopAsyncIteration):
        await anext(generation)
    assert cancels == []


async def test_an_ended_stream_is_not_cancelled(mailbox, generation, cancels):
    mailbox.finish(Delta("", (), FinishReason.LENGTH, USAGE, TIMINGS))
    async with generation:
        await anext(generation)
    await generation.aclose()
    del generation
    assert cancels == []


@pytest.mark.parametrize("leave", ["aclose", "exit", "drop", "task"])
async def test_leaving_early_cancels_once(mailbox, cancels, leave):
    generation = Generation("r", mailbox, lambda: cancels.append("r"))
    if leave == "aclose":
        await generation.aclose()
    elif leave == "exit":
        async with generation:
            pass
    elif leave == "task":
        task = asyncio.create_task(anext(generation))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        del task
    del generation
    assert cancels == ["r"]
