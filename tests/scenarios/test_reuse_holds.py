"""Reuse stops elsewhere; here it goes on: S01 to S05, S07, S09, S11 to S14 and S20, on the device tier."""

import asyncio

import pytest

from cache import CheckpointKind, Frontier
from tests.scenarios.talking import assistant, collect, system, user

pytestmark = pytest.mark.anyio

CLOSURE, STABLE = CheckpointKind.PRIVATE_TURN_CLOSURE, CheckpointKind.SHARED_STABLE_PREFIX
STORY = "The lighthouse keeper wrote down every ship that passed, and at the end of the year he counted them. " * 4


def tokens(seed: int, count: int) -> tuple[int, ...]:
    """A prompt that shares nothing with that of another seed."""
    return (300 + seed, *(500 + (seed * 31 + index * 7) % 3000 for index in range(count - 1)))


@pytest.mark.parametrize("host_cache_mib", [0, 4])
async def test_s01_the_same_body_three_times_on_a_saturated_daemon_hits(talking, host_cache_mib):
    async with talking(host_cache_mib=host_cache_mib) as talk:
        body = [system("You are a keeper of lists."), user(STORY)]
        for round_ in range(2):
            first, *others = [await talk.ask(body) for _ in range(3)]
            assert first.reuse.path == "root" or round_ == 1
            closure = talk.closure(body).tokens
            assert [(each.reuse.path, each.reuse.cached_tokens) for each in others] == [(CLOSURE, closure)] * 2
            assert [each.token_ids for each in others] == [first.token_ids] * 2
            slots = talk.engine.snapshot().state_slots.capacity
            for index in range(10 * slots):
                await talk.ask(tokens(1000 * round_ + index, 20), max_tokens=1)


async def test_s02_a_new_prompt_twice_hits_when_every_pool_was_filled_three_times(talking):
    async with talking(kv_pages=64) as talk:
        pools = talk.engine.snapshot()
        size = 3 * pools.kv_pages.capacity * talk.engine.page_size // (3 * pools.state_slots.capacity)
        for index in range(3 * pools.state_slots.capacity):
            await talk.ask(tokens(index, size), max_tokens=1)
        new = tokens(77, size)
        await talk.ask(new)
        assert (await talk.ask(new)).reuse.cached_tokens == size - 1


async def test_s03_every_conversation_hits_on_its_own_turns(talking):
    async with talking() as talk:
        for number in range(5):
            history = [user(f"Conversation {number}. {STORY[:60]}")]
            for turn in range(3):
                expected = talk.best(history)
                assert (await talk.ask(history)).reuse.cached_tokens == expected
                assert (expected > 0) == (turn > 0)
                history += [assistant(f"Answer {turn}."), user(f"And what about {turn}?")]


async def test_s04_the_reused_frontier_of_a_growing_chat_grows_every_turn(talking):
    async with talking() as talk:
        history, frontiers = [user("Let us count.")], []
        for turn in range(40):
            expected = talk.best(history)
            answer = await talk.ask(history, max_tokens=1)
            assert answer.reuse.cached_tokens == expected
            frontiers.append(answer.reuse.cached_tokens)
            history += [assistant(f"{turn}."), user(f"After {turn}?")]
        assert frontiers == sorted(set(frontiers))


async def test_s05_reuse_follows_the_prompt_of_a_tool_loop(talking):
    async with talking(max_context=4096) as talk:
        history, frontiers = [user("Look up all the harbours.")], []
        for step in range(30):
            expected = talk.best(history)
            assert (await talk.ask(history, max_tokens=1)).reuse.cached_tokens == expected
            frontiers.append(expected)
            call = {"function": {"name": "look_up", "arguments": {"harbour": str(step)}}}
            history += [
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "content": f"Harbour {step} is open."},
            ]
        assert frontiers == sorted(set(frontiers))


async def test_s07_fifty_users_hit_one_system_prompt(talking):
    async with talking() as talk:
        shared = system(f"You answer politely. {STORY[:100]}")
        for number in range(50):
            request = talk.request([shared, user(f"{number} is my number.")], max_tokens=1)
            stable = next(f.tokens for f in request.frontiers if f.kind is STABLE)
            answer = await talk.serve(request)
            expected = ("root", 0) if number == 0 else (STABLE, stable)
            assert (answer.reuse.path, answer.reuse.cached_tokens) == expected


async def test_s09_two_long_chats_that_alternate_hit_on_every_turn(talking):
    async with talking(max_concurrency=1) as talk:
        chats = [[user(f"{name}. {STORY}")] for name in ("One", "Two")]
        for turn in range(5):
            for history in chats:
                expected = talk.best(history)
                assert (await talk.ask(history)).reuse.cached_tokens == expected
                assert (expected > 0) == (turn > 0)
                history += [assistant("Yes."), user(f"Go on, {turn}.")]


async def test_s11_a_side_request_with_a_huge_limit_does_not_evict_a_long_chat(talking):
    async with talking(kv_pages=64) as talk:
        chat = tokens(1, 600)
        await talk.ask(chat)
        side = talk.engine.submit(talk.request(tokens(2, 20), max_tokens=32_000))
        async with side:
            await anext(side)
            assert (await talk.ask(chat)).reuse.cached_tokens == len(chat) - 1


async def test_s12_a_burst_of_identical_prompts_is_computed_once(talking):
    async with talking(max_concurrency=8) as talk:
        body = [user(STORY)]
        prompt, closure = len(talk.request(body).prompt_token_ids), talk.closure(body).tokens
        answers = await talk.together([body] * 8)
        assert sorted(each.reuse.cached_tokens for each in answers) == [0, *[closure] * 7]
        assert len({tuple(each.token_ids) for each in answers}) == 1
        # A part of a prompt that is one token counts as a decode; each answer's second token is one.
        done = talk.engine.snapshot()
        assert done.prefill_tokens_total + done.decode_tokens_total == prompt + 7 * (prompt - closure) + 8


async def test_s12_others_pass_those_that_wait_for_a_prefix(talking, stand_still):
    async with talking() as talk:
        reached, go = stand_still(1)
        first, second, other = (
            talk.engine.submit(talk.request(tokens(seed, size), max_tokens=1))
            for seed, size in ((1, 200), (1, 200), (2, 20))
        )
        assert await asyncio.to_thread(reached.wait, 60)
        assert (talk.engine.snapshot().running, talk.engine.snapshot().waiting) == (2, 1)
        go.set()
        await collect(other)
        assert (await collect(first)).reuse.cached_tokens == 0
        assert (await collect(second)).reuse.cached_tokens == 199


async def test_s12_the_end_of_the_leader_releases_those_that_wait_for_it(talking, stand_still):
    async with talking() as talk:
        reached, go = stand_still(1)
        leader, follower = (talk.engine.submit(talk.request(tokens(1, 200), max_tokens=1)) for _ in range(2))
        assert await asyncio.to_thread(reached.wait, 60)
        await leader.aclose()
        go.set()
        assert (await collect(follower)).reuse.cached_tokens == 2 * talk.engine.options.prefill_chunk


@pytest.mark.parametrize("size", [1, 2, 3, 15, 16, 17, 18, 31, 32, 33])
async def test_s13_a_frontier_anywhere_in_a_page_gives_the_closed_form_hit(talking, size):
    async with talking() as talk:
        prompt = tokens(3, size)
        await talk.ask(prompt, max_tokens=1)
        assert (await talk.ask(prompt)).reuse.cached_tokens == size - 1
        longer = (*prompt, *tokens(4, 5))
        expected = talk.best(longer)
        assert (await talk.ask(longer)).reuse.cached_tokens == expected >= size - 1


@pytest.mark.parametrize("frontier", [15, 16, 17])
async def test_s13_a_prompt_as_long_as_a_checkpoint_leaves_one_token_to_compute(talking, frontier):
    async with talking() as talk:
        long = tokens(5, 40)
        await talk.ask(long, frontiers=(Frontier(frontier, CLOSURE), Frontier(frontier - 1, STABLE)))
        assert (await talk.ask(long[:frontier])).reuse.cached_tokens == frontier - 1


async def test_s14_a_fork_of_a_chat_that_has_gone_on_hits_near_its_branch(talking):
    async with talking(device_state_slots=16) as talk:
        history, turns = [user("Tell me about the sea.")], 8
        for turn in range(turns):
            await talk.ask(history, max_tokens=1)
            history += [assistant(f"Part {turn}."), user(f"What then, {turn}?")]
        branch = history[: 1 + 2 * turns // 4]
        fork = [*branch, assistant("Part 2."), user("Something else, please.")]
        answer = await talk.ask(fork)
        assert answer.reuse.cached_tokens == talk.closure(branch).tokens


async def test_s60_what_the_answers_tell_adds_up_to_what_the_counters_say(talking):
    async with talking() as talk:
        prompts = [(*tokens(1, 50), *tokens(2 + index // 3, 30)) for index in range(12)]
        answers = await talk.together(prompts)
        counted = talk.engine.snapshot().cache
        assert counted.reused_tokens == sum(answer.usage.cached_tokens for answer in answers) > 0
        assert counted.selections.total() == len(answers)


async def test_s20_an_edit_deep_in_the_history_is_reused_up_to_the_edit(talking):
    async with talking(device_state_slots=16) as talk:
        history = [user("Tell me about the sea.")]
        for turn in range(6):
            await talk.ask(history, max_tokens=1)
            history += [assistant(f"Part {turn}."), user(f"What then, {turn}?")]
        edited = [*history[:4], user("What then, my friend?"), *history[5:]]
        assert edited != history
        answer = await talk.ask(edited)
        assert answer.reuse.cached_tokens == talk.closure(history[:3]).tokens
