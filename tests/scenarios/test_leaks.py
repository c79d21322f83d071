"""Every exit gives everything back: S21, S22, S24, S26, S29 and S30, on the device tier."""

import asyncio

import pytest

from cache import CheckpointKind, Frontier, check
from engine.errors import EngineUnavailableError
from tests.scenarios.talking import collect, user

pytestmark = pytest.mark.anyio

PROMPT = tuple(range(400, 600))
SEGMENTS = 5
"""64, 64, 64 and 7 tokens up to the closure, and the last one."""


async def cancel_at(talk, stand_still, step: int, prompt=PROMPT, max_tokens: int = 8) -> None:
    """Leave while the step of this number, counted from the request's first, is running."""
    reached, go = stand_still(step)
    generation = talk.engine.submit(talk.request(prompt, max_tokens))
    assert await asyncio.to_thread(reached.wait, 60)
    await generation.aclose()
    go.set()
    await talk.engine._loop.wait_until_empty()


@pytest.mark.parametrize("stage", ["prefilling", "restoring"])
async def test_s21_leaving_in_any_segment_holds_nothing(talking, stand_still, stage):
    async with talking() as talk:
        if stage == "restoring":
            await talk.ask(PROMPT[:100])
        for step in range(SEGMENTS + 3):
            await cancel_at(talk, stand_still, step)
            assert talk.held() == [0, 0, 0, 0]
            assert talk.engine.check() == []


async def test_s21_leaving_before_the_first_step_and_in_the_queue_holds_nothing(talking, stand_still):
    async with talking(max_concurrency=1) as talk:
        await talk.engine.submit(talk.request(PROMPT)).aclose()
        reached, go = stand_still(1)
        running = talk.engine.submit(talk.request(PROMPT))
        queued = talk.engine.submit(talk.request([user("Is anybody there?")]))
        assert await asyncio.to_thread(reached.wait, 60)
        assert talk.engine.snapshot().waiting == 1
        await queued.aclose()
        go.set()
        await collect(running)
        assert talk.held() == [0, 0, 0, 0]


async def test_s22_after_200_disconnects_service_is_normal_at_full_concurrency(talking):
    async with talking(max_pending_requests=200) as talk:
        for index in range(200):
            generation = talk.engine.submit(talk.request((7, index % 20, *PROMPT[: index % 50]), max_tokens=50))
            for _ in range(index % 7):
                await asyncio.sleep(0)
            await generation.aclose()
        await talk.engine._loop.wait_until_empty()
        assert talk.held() == [0, 0, 0, 0]
        await talk.together([PROMPT[index : index + 40] for index in range(8)])
        snapshot = talk.engine.snapshot()
        free = snapshot.state_slots.capacity - snapshot.state_slots.free
        assert free == snapshot.state_slots.cached


async def test_s24_cancelling_one_that_waits_stops_only_that_one(talking, stand_still):
    async with talking(max_concurrency=1) as talk:
        expected = await talk.ask(PROMPT[:50], max_tokens=12)
        reached, go = stand_still(4)
        decoding = talk.engine.submit(talk.request(PROMPT[:50], max_tokens=12))
        waiting, last = (talk.engine.submit(talk.request(PROMPT[index:100])) for index in (1, 2))
        assert await asyncio.to_thread(reached.wait, 60)
        await waiting.aclose()
        go.set()
        assert (await collect(decoding)).token_ids == expected.token_ids
        assert (await collect(last)).usage.completion_tokens == 2


async def test_s26_a_step_that_raises_costs_its_requests_and_leaves_the_rest(talking, steps):
    async with talking() as talk:
        cold = await talk.ask(PROMPT, max_tokens=4)

        def fail(_runner, _plan):
            steps.before = lambda *_: None
            raise RuntimeError("bad kernel")

        for prompt in (PROMPT, PROMPT[:150]):
            steps.before = fail
            with pytest.raises(EngineUnavailableError, match=r"\(RuntimeError\)"):
                await talk.ask(prompt)
            assert talk.held() == [0, 0, 0, 0]
            assert talk.engine.check() == []
        assert (await talk.ask(PROMPT, max_tokens=4)).token_ids == cold.token_ids


async def test_s26_a_broken_checkpoint_costs_one_request_and_not_its_retry(talking):
    async with talking() as talk:
        cold = await talk.ask(PROMPT, max_tokens=4)
        state = talk.engine._loop._runner._storage.state
        for tensor in (*state.conv, *state.recurrent):
            tensor.fill_(float("nan"))
        with pytest.raises(EngineUnavailableError, match="NonFiniteLogitsError"):
            await talk.ask(PROMPT)
        for _ in range(talk.engine.snapshot().state_slots.capacity):
            try:
                answer = await talk.ask(PROMPT, max_tokens=4)
                break
            except EngineUnavailableError:
                continue
        assert answer.token_ids == cold.token_ids


async def test_s26_three_failures_in_a_row_begin_anew_without_what_was_remembered(talking, steps):
    async with talking() as talk:
        cold = await talk.ask(PROMPT, max_tokens=4)
        left = iter(range(3))

        def fail(_runner, _plan):
            if next(left, None) is not None:
                raise RuntimeError("bad kernel")

        steps.before = fail
        for _ in range(3):
            with pytest.raises(EngineUnavailableError):
                await talk.ask(PROMPT)
        answer = await talk.ask(PROMPT, max_tokens=4)
        assert (answer.reuse.path, answer.token_ids) == ("root", cold.token_ids)
        assert talk.engine.snapshot().loop_restarts_total == 1


@pytest.mark.parametrize("way_out", ["finish", "abort"])
async def test_s29_closing_a_lease_again_gives_nothing_back_twice(talking, steps, way_out):
    async with talking() as talk:
        cache, leases = talk.engine._loop.scheduler.cache, {}

        def note(_runner, _plan):
            leases.update((lease.request_id, (lease, lease.slot)) for lease in cache.leases)

        steps.before = note
        await talk.ask(PROMPT)
        await talk.ask(PROMPT, max_tokens=4)
        before = (cache.pages.counts(), cache.slots.counts())
        assert len(leases) == 2
        for lease, slot in leases.values():
            assert not lease.is_open
            getattr(cache, way_out)(lease, PROMPT, len(PROMPT), 1.0)
            was_kept = slot.is_open
            if not was_kept:
                slot.close()
        assert (cache.pages.counts(), cache.slots.counts()) == before
        assert talk.engine.check() == talk.engine.check() == []


async def test_s29_a_match_and_a_ticket_that_are_closed_again_give_nothing_back_twice(talking):
    async with talking() as talk:
        await talk.ask(PROMPT)
        cache = talk.engine._loop.scheduler.cache
        before = (cache.pages.counts(), cache.slots.counts())
        unused = cache.match("unused", "", PROMPT)
        assert unused.cached_tokens > 0
        for _ in range(2):
            cache.release(unused)
            assert (cache.pages.counts(), cache.slots.counts()) == before
        other = PROMPT[::-1]
        lease = cache.admit(cache.match("other", "", other), len(other), (), 0.0)
        ticket = cache.capture(lease, Frontier(64, CheckpointKind.PRIVATE_LONG_ANCHOR))
        for close in (cache.discard, cache.discard, lambda again: cache.publish(again, 0.0)):
            close(ticket)
            assert cache.slots.counts().in_flight == 0
        for _ in range(2):
            cache.abort(lease, other, 0, 0.0)
            assert talk.held() == [0, 0, 0, 0]
        # The ticket took the place of one checkpoint.
        after = (cache.pages.counts(), cache.slots.counts())
        assert after[1].free == before[1].free + 1
        assert talk.engine.check() == []


async def test_s29_references_are_never_negative_and_two_audits_agree_at_every_step(talking, steps):
    async with talking(max_concurrency=4, kv_pages=64) as talk:
        scheduler, audits = talk.engine._loop.scheduler, []

        def audit(_runner, _plan):
            pages = [page for lease in scheduler.cache.leases for page in lease.pages]
            least = min(min(page.cached_refs, *page.pins.values()) for page in pages)
            pins = min((checkpoint.pins for checkpoint in scheduler.cache.tiers.store), default=0)
            audits.append((min(least, pins), check(scheduler.cache), check(scheduler.cache)))

        steps.before = audit
        for number in range(2):
            generations = [
                talk.engine.submit(talk.request((*PROMPT[: number * 50 + 20], index), max_tokens=30))
                for index in range(8)
            ]
            for generation in generations[::3]:
                await anext(generation)
                await generation.aclose()
            await asyncio.gather(*(collect(each) for index, each in enumerate(generations) if index % 3))
        assert len(audits) > 30
        assert [audit for audit in audits if audit[0] < 0 or audit[1] or audit[2]] == []


async def test_s30_what_a_suspended_request_finds_again_of_its_own_is_no_hit(talking):
    async with talking(kv_pages=29, max_context=384) as talk:
        prompts = [tuple(range(base, base + 150)) for base in (400, 800)]
        answers = await talk.together(prompts, max_tokens=90)
        assert talk.engine.snapshot().suspensions_total > 0
        assert [answer.reuse.cached_tokens for answer in answers] == [0, 0]
        assert talk.engine.snapshot().cache.reused_tokens == 0
