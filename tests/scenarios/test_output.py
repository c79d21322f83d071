"""A hit changes nothing but the time: S31 to S34, S36 and S37, on the device tier."""

import asyncio
import random

import pytest
import torch

from engine.runner import Runner
from tests.scenarios.talking import Talk, assistant, collect, system, user

pytestmark = pytest.mark.anyio

CONVERSATIONS = 30
WORDS = [
    "harbour",
    "light",
    "ship",
    "keeper",
    "count",
    "year",
    "rain",
    "stone",
    "letter",
    "paper",
    "window",
    "north",
    "ladder",
    "silver",
]


def conversation(number: int) -> list[list[dict[str, str]]]:
    """The prompts of a chat, turn by turn; some share a system prompt, and some rewrite what was said."""
    at_random = random.Random(number)

    def words(at_most: int) -> str:
        return " ".join(at_random.choices(WORDS, k=at_random.randint(1, at_most)))

    history = [system("Speak of the sea.")] if number % 2 else []
    turns = []
    for _ in range(at_random.randint(1, 4)):
        history = [*history, user(words(30))]
        turns.append(history)
        history = [*history, assistant(words(5))]
    if len(turns) > 2:
        turns.append([*turns[1][:-1], user(words(10))])
    return turns


@pytest.fixture
def first_logits(monkeypatch) -> dict[tuple[int, ...], torch.Tensor]:
    """The logits after each prompt that is a whole segment's end, by the tokens of the sampled rows' requests."""
    found: dict[tuple[int, ...], torch.Tensor] = {}
    run = Runner.run

    def recording(self, plan):
        sample = self._kernels.sample
        sampled = [segment for segment in plan.segments if segment.is_sampled]

        def keep(logits, batch):
            for segment, row in zip(sampled, logits, strict=True):
                found.setdefault((segment.end, *segment.token_ids[-1:], segment.request_id), row.clone())
            return sample(logits, batch)

        self._kernels.sample = keep
        try:
            return run(self, plan)
        finally:
            del self._kernels.sample

    monkeypatch.setattr(Runner, "run", recording)
    return found


async def test_s31_after_a_hit_tokens_and_logits_are_those_of_a_cold_run(talking, first_logits):
    prompts = [turn for number in range(CONVERSATIONS) for turn in conversation(number)]

    async def answers(talk: Talk) -> list[tuple[list[int], torch.Tensor, int]]:
        results = []
        for prompt in prompts:
            first_logits.clear()
            answer = await talk.ask(prompt, max_tokens=3)
            results.append((answer.token_ids, next(iter(first_logits.values())), answer.reuse.cached_tokens))
        return results

    async with talking(prefix_reuse=False) as talk:
        cold = await answers(talk)
    async with talking() as talk:
        warm = await answers(talk)
        hits = sum(cached > 0 for *_, cached in warm)
        assert hits > len(prompts) // 2
        assert len(talk.engine._loop.scheduler.cache.stats.selections) >= 2
    assert [tokens for tokens, *_ in warm] == [tokens for tokens, *_ in cold]
    worst = max(float((a - b).abs().max()) for (_, a, _), (_, b, _) in zip(warm, cold, strict=True))
    assert worst < 1e-4


async def test_s32_freed_pages_and_slots_full_of_nan_change_nothing(talking, monkeypatch):
    queue = Runner._queue
    engines = []

    def poisoning(self, plan):
        for engine in engines:
            cache = engine._loop.scheduler.cache
            for pool, tensors in (
                (cache.pages, self._storage.state.kv),
                (cache.slots, (*self._storage.state.conv, *self._storage.state.recurrent)),
            ):
                held = {unit for lease in pool.leases() for unit in lease.units}
                for unit in set(range(pool.capacity)) - held:
                    for tensor in tensors:
                        tensor[unit].fill_(float("nan"))
            held = {unit for lease in cache.host.leases() for unit in lease.units}
            self._storage._host[[unit for unit in range(cache.host.capacity) if unit not in held]] = 255
        return queue(self, plan)

    monkeypatch.setattr(Runner, "_queue", poisoning)
    prompts = [turn for number in range(6) for turn in conversation(number)]
    async with talking(kv_pages=64, host_cache_mib=0) as talk:
        expected = [(await talk.ask(prompt, 3)).token_ids for prompt in prompts]
    async with talking(kv_pages=64, host_cache_mib=16) as talk:
        engines.append(talk.engine)
        assert [(await talk.ask(prompt, 3)).token_ids for prompt in prompts] == expected
        answers = await talk.together(prompts, 3)
        assert [answer.token_ids for answer in answers] == expected


async def test_s33_conversations_that_differ_in_a_marker_never_get_the_other_s_answer(talking):
    def prompts(marker: int) -> list[list[dict[str, str]]]:
        first = [system("Keep the secret."), user(f"The secret is {marker}.")]
        return [first, [*first, assistant("I see."), user("What is the secret?")]]

    markers = range(17, 25)
    async with talking(prefix_reuse=False) as talk:
        expected = {m: [(await talk.ask(prompt, 8)).token_ids for prompt in prompts(m)] for m in markers}
    async with talking() as talk:
        for _ in range(2):
            for turn in range(2):
                answers = await talk.together([prompts(m)[turn] for m in markers], 8)
                assert [answer.token_ids for answer in answers] == [expected[m][turn] for m in markers]


async def test_s34_a_request_after_a_cancel_in_any_segment_equals_the_cold_run(talking, stand_still):
    prompt = tuple(range(400, 600))
    async with talking(prefix_reuse=False) as talk:
        cold = await talk.ask(prompt, max_tokens=4)
    for step in range(7):
        async with talking() as talk:
            reached, go = stand_still(step)
            generation = talk.engine.submit(talk.request(prompt, max_tokens=8))
            assert await asyncio.to_thread(reached.wait, 60)
            await generation.aclose()
            go.set()
            answer = await talk.ask(prompt, max_tokens=4)
            assert answer.token_ids == cold.token_ids
            computed = min(64 * (step + 1), len(prompt) - 1)
            assert answer.reuse.cached_tokens == computed


async def test_s36_alone_or_among_eight_the_tokens_are_the_same(talking):
    prompts = [conversation(number)[-1] for number in range(8)]
    async with talking(max_concurrency=8) as talk:
        alone = [(await talk.ask(prompt, 6)).token_ids for prompt in prompts]
        warm = await talk.together(prompts, 6)
        talk.engine._loop.scheduler.cache.reset()
        cold = await talk.together(prompts, 6)
        assert [each.token_ids for each in warm] == [each.token_ids for each in cold] == alone


class Collision(int):
    """A token whose hash is that of every other: tokens must decide."""

    def __hash__(self) -> int:
        return 7


async def test_s37_with_one_hash_for_everything_tokens_decide(talking):
    def tokens(seed: int) -> tuple[int, ...]:
        at_random = random.Random(seed)
        return tuple(Collision(300 + at_random.randint(0, 3)) for _ in range(at_random.randint(5, 60)))

    prompts = [tokens(seed) for seed in range(12)]
    prompts += [(*prompt, *tokens(99)) for prompt in prompts]
    async with talking(prefix_reuse=False, page_size=2, kv_pages=1024) as talk:
        cold = [(await talk.ask(prompt, 3)).token_ids for prompt in prompts]
    async with talking(page_size=2, kv_pages=1024, device_state_slots=40) as talk:
        for _ in range(2):
            requests = [talk.request(prompt, 3) for prompt in prompts]
            assert [(await collect(talk.engine.submit(each))).token_ids for each in requests] == cold
        assert talk.engine._loop.scheduler.cache.stats.reused_tokens > 0
