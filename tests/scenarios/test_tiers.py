"""Reuse that holds because host memory remembers, and because the right ones give way: S10, S16 to S20, S31."""

import pytest

from cache import CheckpointKind, Tier
from tests.scenarios.talking import Talk, assistant, system, user

pytestmark = pytest.mark.anyio

SIDE_REQUESTS = 200


def tokens(first: int, count: int) -> tuple[int, ...]:
    """A prompt of its own for each `first`."""
    return tuple(300 + (first * 13 + place * (first % 29 + 3)) % 1500 for place in range(count))


def cached_of(talk: Talk, prompt: tuple[int, ...]) -> int:
    """What a request with this prompt would reuse now."""
    cache = talk.engine._loop.scheduler.cache
    match = cache.match("who asks", "", prompt)
    cache.release(match)
    return match.cached_tokens


async def test_s10_a_long_chat_hits_after_200_one_shot_requests_between_its_turns(talking):
    async with talking() as talk:
        chat = tokens(1, 400)
        await talk.ask(chat)
        for number in range(SIDE_REQUESTS):
            await talk.ask(tokens(1000 + number, 50), max_tokens=1)
        answer = await talk.ask((*chat, *tokens(50, 60)))
        assert answer.reuse.cached_tokens == len(chat) - 1


async def test_s16_a_checkpoint_is_demoted_used_from_host_memory_and_the_next_turn_is_on_the_device(talking):
    async with talking(host_cache_mib=64) as talk:
        chat = tokens(1, 150)
        await talk.ask(chat)
        for number in range(4):
            await talk.ask(tokens(10 + number, 150))
        await talk.engine._loop.wait_until_empty()
        # Which of them the device still holds depends on how long each took.
        await talk.engine.reset_cache([Tier.DEVICE])
        chat = (*chat, *tokens(60, 20))
        second = await talk.ask(chat)
        assert second.reuse.source == {"device": 0, "host": 149, "disk": 0}
        chat = (*chat, *tokens(70, 20))
        third = await talk.ask(chat)
        assert third.reuse.source == {"device": 169, "host": 0, "disk": 0}
        counted = talk.engine.snapshot().cache
        assert (counted.restores, counted.restore_failures) == (1, 0)


async def test_s17_host_memory_full_of_copies_of_what_is_on_the_device_yields_to_what_is_not(talking):
    async with talking(device_state_slots=4, host_cache_mib=8) as talk:
        store = talk.engine._loop.scheduler.cache.tiers.store
        prompts = [tokens(number, 60) for number in range(3)]
        for prompt in prompts:
            await talk.ask(prompt)
        # Little has happened, and host memory that was vacant is full of copies.
        assert all(checkpoint.slot is not None for checkpoint in store if checkpoint.is_in_host)
        prompts += [tokens(number, 60) for number in range(3, 12)]
        for prompt in prompts[3:]:
            await talk.ask(prompt)
        host_only = [checkpoint for checkpoint in store if checkpoint.is_in_host and checkpoint.slot is None]
        assert len(host_only) >= talk.engine.snapshot().host_state_slots.capacity - 1
        hits = [cached_of(talk, (*prompt, 1)) > 0 for prompt in prompts]
        assert sum(hits) >= 4 + talk.engine.snapshot().host_state_slots.capacity - 2


async def test_s18_occupancy_never_falls_by_half_in_one_step(talking, steps):
    async with talking(kv_pages=96) as talk:
        cache, occupied = talk.engine._loop.scheduler.cache, []
        steps.before = lambda *_: occupied.append(cache.pages.capacity - cache.pages.free)
        for number in range(40):
            await talk.ask(tokens(number, 40 + number * 37 % 300))
        full = next(index for index, count in enumerate(occupied) if count > 0.8 * cache.pages.capacity)
        pairs = zip(occupied[full:], occupied[full + 1 :], strict=False)
        assert [pair for pair in pairs if pair[1] <= pair[0] / 2] == []


async def test_s19_interleaved_sub_agents_hit_their_common_preamble(talking):
    preamble = tokens(1, 300)
    async with talking(device_state_slots=4, host_cache_mib=48) as talk:
        agents = [(*preamble, *tokens(100 + agent, 20)) for agent in range(14)]
        firsts = [await talk.ask(prompt) for prompt in agents]
        # Two show that they share it; where they part is a checkpoint.
        assert firsts[0].reuse.cached_tokens == 0
        assert [answer.reuse.path for answer in firsts[2:]] == [CheckpointKind.SHARED_BRANCH] * 12
        assert {answer.reuse.cached_tokens for answer in firsts[2:]} == {300}
        for step in range(1, 9):
            for agent in range(14):
                agents[agent] = (*agents[agent], *tokens(200 + step * 14 + agent, 10))
                answer = await talk.ask(agents[agent])
                assert answer.reuse.cached_tokens >= 300


async def test_s20_an_edit_is_told_with_the_exact_token_where_it_begins(talking):
    async with talking(host_cache_mib=16) as talk:
        history = [system("Speak of the sea."), user("Tell me of the harbour and of the ships in the rain.")]
        await talk.ask(history)
        history = [*history, assistant("There are many."), user("How many ships are there in the harbour?")]
        before = talk.request(history).prompt_token_ids
        await talk.ask(history)
        history = [*history[:-1], user("How many stones are there in the harbour?"), assistant("Ten."), user("Why?")]
        after = talk.request(history).prompt_token_ids
        edit = next(place for place, (old, new) in enumerate(zip(before, after, strict=False)) if old != new)
        answer = await talk.ask(history)
        assert answer.reuse.diverged_at == edit
        assert answer.reuse.lost["diverged"] == talk.closure(history).tokens - edit
        assert 0 < answer.reuse.cached_tokens <= edit
        again = await talk.ask([*history, assistant("So."), user("And then?")])
        assert (again.reuse.diverged_at, again.reuse.lost.get("diverged")) == (None, None)


async def test_s31_after_a_restore_from_host_memory_the_tokens_are_those_of_a_cold_run(talking):
    prompts = [tokens(number, 40 + number * 11) for number in range(5)]
    async with talking(prefix_reuse=False) as talk:
        cold = [(await talk.ask((*prompt, turn), 6)).token_ids for turn in range(3) for prompt in prompts]
    async with talking(host_cache_mib=48) as talk:
        warm = [await talk.ask((*prompt, turn), 6) for turn in range(3) for prompt in prompts]
        assert [answer.token_ids for answer in warm] == cold
        assert sum(answer.reuse.source["host"] > 0 for answer in warm) >= 3
