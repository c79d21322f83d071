"""What a daemon says of itself after minutes, or when its books are wrong (S16, S18, S27, S56, S58, S60): over HTTP, in
this process, with a clock that can be put forward."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx
import pytest

from cache import ContextCache, Holder, UnitState
from cache.costs import Rate
from engine.engine import Engine
from ops.operations import Operations
from server.app import create_app
from server.daemon import Daemon
from server.settings import CacheSettings, EngineSettings, ServerSettings, Settings
from server.watch.source import parse_metrics
from tests.scenarios.sse import events
from tests.scenarios.telling import Body, ids_of, insight_of
from tests.server.conftest import client_of
from tests.waiting import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
COLLAPSED = "prefix.reuse_collapsed"
SYSTEM = {"role": "system", "content": "You keep the harbour's book and answer in one word. " * 3}


class Clock:
    """Runs on, and can be put forward."""

    def __init__(self) -> None:
        self.skipped_seconds = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.skipped_seconds


class Watched(Operations):
    """Lets a test wait for the next judgement."""

    def __init__(self, *parts: Any, **options: Any) -> None:
        super().__init__(*parts, **options)
        self.judgements = 0
        self.was_judged = asyncio.Event()

    def tick(self, *seen: Any) -> None:
        super().tick(*seen)
        self.judgements += 1
        self.was_judged.set()


class Silent:
    """In the place of the log."""

    def write(self, record: Any) -> None:
        pass


@dataclass
class House:
    """A daemon with everything that is wired to it, and a client of it."""

    daemon: Daemon
    client: httpx.AsyncClient
    clock: Clock

    @property
    def engine(self) -> Engine:
        return self.daemon.engine

    async def ask(self, messages: list[Body], **fields: Any) -> Body:
        """An answer, whole."""
        body = {"messages": messages, "max_tokens": 2, "temperature": 0} | fields
        answer = await self.client.post(CHAT, json=body)
        assert answer.status_code == 200, answer.text
        return events(answer.text)[-1] if fields.get("stream") else answer.json()

    async def told(self) -> Body:
        """The insights, once everything that has happened so far was judged."""
        operations = self.daemon.operations
        assert isinstance(operations, Watched)
        wanted = operations.judgements + 2
        while operations.judgements < wanted:
            operations.was_judged.clear()
            await asyncio.wait_for(operations.was_judged.wait(), PATIENCE_SECONDS)
        return await self.get("/insights")

    async def get(self, path: str) -> Body:
        answer = await self.client.get(path)
        return answer.json()

    async def do(self, work) -> Any:
        """To the cache, between two steps."""
        return await self.engine._loop.between_steps(lambda scheduler: work(scheduler.cache))


@pytest.fixture
def living(monkeypatch):
    """A context manager: a House with these settings of the cache; when it is left, nothing is held."""
    monkeypatch.setattr("server.daemon.Console", Silent)
    clock = Clock()
    monkeypatch.setattr("server.daemon.Operations", partial(Watched, clock=clock))

    @contextlib.asynccontextmanager
    async def start(max_concurrency: int = 2, tick_seconds: float = 0.02, **cache: Any):
        monkeypatch.setattr("server.daemon._TICK_SECONDS", tick_seconds)
        sizes = {"device_state_slots": 2, "kv_pages": 256, "host_cache_mib": 32} | cache
        settings = Settings(
            server=ServerSettings(model="demo"),
            engine=EngineSettings(max_concurrency=max_concurrency, max_context=1024),
            cache=CacheSettings(**sizes),
        )
        app = create_app(settings)
        daemon = app.state.daemon
        await daemon.start()
        try:
            async with client_of(app) as client:
                yield House(daemon, client, clock)
                assert await daemon.drain(PATIENCE_SECONDS)
                now = daemon._engine.snapshot()
                assert [(pool.pinned, pool.in_flight) for pool in now.pools.values()] == [(0, 0)] * 4
        finally:
            await daemon.stop()

    return start


def question(number: int, words: int = 12) -> list[Body]:
    """A prompt that shares nothing with that of another number but how prompts begin."""
    said = " ".join(f"{number * 31 + place * (number % 7 + 3):x}" for place in range(words))
    return [{"role": "user", "content": f"{number}: {said}"}]


ALWAYS = 1e12
"""Seconds: what was measured then is never too old to be believed."""


def copy_slowly(cache) -> None:
    """As on a machine where every copy from host memory was measured to take an age."""
    cache.costs.saw_restore(1, 1e6, ALWAYS)


async def test_s56_prompts_quicker_computed_than_copied_back_are_the_floor_and_no_fault(living):
    async with living() as house:
        await house.do(copy_slowly)
        structural = 0
        for _ in range(4):
            for number in range(8):
                answer = await house.ask(question(number))
                structural += answer["reuse"]["lost"].get("structural", 0) > 0
        assert structural >= 10
        told = await house.told()
        assert (told["status"], told["reuse"], ids_of(told)) == ("ok", "healthy", ["cache.structural_floor"])
        found = insight_of(told, "cache.structural_floor")
        assert found["severity"] == "info"
        assert found["evidence"]["requests_below_the_reuse_unit"] == structural
        assert found["evidence"]["structural_tokens"] > 0


async def test_s16_host_memory_that_is_written_and_never_read_is_told_until_it_is_read(living):
    async with living() as house:
        await house.do(copy_slowly)
        for _ in range(2):
            for number in range(16):
                await house.ask(question(number))
        cache = await house.get("/admin/cache")
        assert cache["checkpoints_demoted"] >= 16
        assert cache["restores"] == 0
        assert "cache.tier_inert" not in ids_of(await house.told())
        house.clock.skipped_seconds += 301
        found = insight_of(await house.told(), "cache.tier_inert")
        assert found["severity"] == "notice"
        assert found["evidence"]["restores"] == 0
        assert 16 <= found["evidence"]["checkpoints_written"] <= cache["checkpoints_demoted"]
        assert (await house.get("/health"))["status"] == "ok"

        await house.do(lambda cache: setattr(cache.costs, "_restores", Rate()))
        sources = [(await house.ask(question(number)))["reuse"]["source"] for number in range(16)]
        assert any(source["host"] > 0 for source in sources)
        assert "cache.tier_inert" not in ids_of(await house.told())


async def test_s18_a_pool_that_overflows_gives_up_no_more_than_it_must_and_one_that_empties_at_once_is_told(living):
    capacity, longest = 64, 18
    async with living(kv_pages=capacity, host_cache_mib=0, device_state_slots=16) as house:
        occupied, is_full = 0, False
        for number in range(40):
            answer = await house.ask(question(number, 4 + number * 37 % 55), max_tokens=1)
            assert answer["usage"]["prompt_tokens"] < longest * 16
            pool = (await house.get("/admin/cache"))["pools"]["device_kv_pages"]
            before, occupied = occupied, capacity - pool["free"]
            assert occupied > before - longest
            is_full = is_full or occupied > 0.8 * capacity
        assert is_full
        assert ids_of(await house.told()) == []

        gone = (await house.client.post("/admin/cache/reset", json={"tiers": ["device"]})).json()
        assert gone["tiers"]["device"]["checkpoints"] > 4
        assert ids_of(await house.told()) == [], "somebody asked for it"
        house.clock.skipped_seconds += 60

        for number in range(100, 120):
            await house.ask(question(number, 30), max_tokens=1)
        await house.told()
        remembered = (await house.get("/admin/cache"))["pools"]["device_kv_pages"]["cached"]
        await house.do(lambda cache: cache.tiers.free_pages(capacity, ""))
        found = insight_of(await house.told(), "cache.eviction_cliff")
        assert found["severity"] == "warning"
        assert found["evidence"]["device_kv_pages_before"] == remembered
        assert found["evidence"]["device_kv_pages_after"] <= remembered / 2
        house.clock.skipped_seconds += 601
        assert ids_of(await house.told()) == []


async def take_turns_and_stick(house: House) -> Callable[[int], Awaitable[Body]]:
    """Five conversations that hit, and then a pool in which all slots but one are held by nobody; what asks for the
    next turn of a conversation and tells what was reused."""
    people = [[SYSTEM, *question(number)] for number in range(5)]

    async def turn(number: int) -> Body:
        messages = people[number % 5]
        answer = await house.ask(messages)
        messages += [answer["choices"][0]["message"], *question(100 + len(messages) + number % 5)]
        return answer["reuse"]

    hits = [await turn(number) for number in range(15)][10:]
    assert all(hit["path"].startswith("private") for hit in hits)

    def stick(cache: ContextCache) -> None:
        for _ in range(5):
            cache.tiers.take_slot(Holder(UnitState.CACHED, "gone"), "")

    await house.do(stick)
    return turn


async def test_s58_the_books_are_compared_when_requests_lose_what_they_had_and_not_at_the_next_tick(living):
    async with living(1, tick_seconds=3600, device_state_slots=6, host_cache_mib=0, self_heal=False) as house:
        turn = await take_turns_and_stick(house)
        asked = missed = 0
        while (await house.get("/health"))["reuse"] != "collapsed":
            reuse = await turn(asked)
            asked, missed = asked + 1, missed + (reuse["cached_tokens"] < reuse["achievable_tokens"])
            assert (missed <= 5, asked <= 10) == (True, True), "one conversation of five may hit"
        assert (await house.get("/admin/cache"))["audits"] > 0


@pytest.mark.parametrize("self_heal", [True, False], ids=["and heals", "without self-heal"])
async def test_s27_s58_a_pool_stuck_at_all_but_one_is_found_within_five_requests(living, self_heal):
    async with living(1, device_state_slots=6, host_cache_mib=0, self_heal=self_heal) as house:
        turn = await take_turns_and_stick(house)
        missed, seen = 0, set()
        for number in range(15):
            reuse = await turn(number)
            missed += reuse["cached_tokens"] < reuse["achievable_tokens"]
            seen.add((await house.get("/health"))["reuse"])
            if "collapsed" in seen and not self_heal:
                break
            assert missed <= 5 or self_heal
        if self_heal:
            told = await house.told()
            assert "collapsed" not in seen
            assert (told["status"], told["reuse"]) == ("ok", "healthy")
            assert (await house.get("/admin/cache"))["orphans_reclaimed"]["device_state_slots"] == 5
            assert insight_of(told, "cache.ledger_violation")["evidence"]["device_state_slots"] == 5
            return
        assert "collapsed" in seen
        told = await house.told()
        assert insight_of(told, COLLAPSED)["severity"] == "critical"
        assert insight_of(told, "cache.ledger_violation")["evidence"]["violations_remaining"] > 0
        await house.client.post("/admin/cache/reset", json={"tiers": ["device"]})
        asked = 0
        while (await house.get("/health"))["reuse"] != "healthy":
            await turn(asked)
            asked += 1
            assert asked < 60
        told = await house.told()
        assert (told["status"], ids_of(told)) == ("ok", [])


async def test_s60_answers_records_and_counters_say_the_same_of_reuse(living):
    async with living(host_cache_mib=16) as house:
        before = parse_metrics((await house.client.get("/metrics")).text)
        people, answers = [[SYSTEM, *question(number)] for number in range(7)], []
        for turn in range(4):
            for number, messages in enumerate(people):
                answers.append(await house.ask(messages, stream=bool(number % 2)))
                messages += [{"role": "assistant", "content": "So."}, *question(10 * turn + number)]
        after = parse_metrics((await house.client.get("/metrics")).text)
        records = (await house.get(f"/admin/requests?limit={len(answers)}"))["requests"]
    results = [record["answers"][0]["result"] for record in reversed(records)]

    def grown(name: str, **labels: str) -> float:
        label = "".join(f'{{{key}="{value}"}}' for key, value in labels.items())
        return after[f"dalsegno_{name}_total{label}"] - before[f"dalsegno_{name}_total{label}"]

    for answer, result in zip(answers, results, strict=True):
        reuse, usage = answer["reuse"], answer["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == reuse["cached_tokens"] == result["cached_tokens"]
        assert usage["prompt_tokens"] >= reuse["cached_tokens"] >= reuse["source"]["host"] >= 0
        assert sum(reuse["source"].values()) == reuse["cached_tokens"]
        assert {name: result[name] for name in ("achievable_tokens", "source", "lost")} == {
            name: reuse[name] for name in ("achievable_tokens", "source", "lost")
        }
    totals = {
        name: sum(result[f"{name}_tokens"] for result in results) for name in ("cached", "achievable", "expected")
    }
    assert min(totals.values()) > 0
    assert totals == {name: grown(f"reuse_{'achieved' if name == 'cached' else name}_tokens") for name in totals}
    for tier in ("device", "host"):
        tokens = sum(result["source"][tier] for result in results)
        assert tokens == grown("prompt_tokens_by_source", source=tier) > 0
    for reason in {reason for result in results for reason in result["lost"]}:
        assert sum(result["lost"].get(reason, 0) for result in results) == grown("reuse_lost_tokens", reason=reason)


async def test_s58_a_rotation_in_which_nothing_is_kept_any_more_is_found_within_five_requests(living):
    """Eight people in a fixed order, whose conversations have a system prompt of their own and end all at once: for a
    cache that drops what was used longest ago there is no worse."""
    async with living(1, device_state_slots=2, host_cache_mib=60, host_state_slots=12) as house:

        async def turn(messages: list[Body], number: int) -> Body:
            messages += question(number, 24)
            answer = await house.ask(messages)
            messages.append(answer["choices"][0]["message"])
            return answer["reuse"]

        def begin(number: int) -> list[Body]:
            return [{"role": "system", "content": question(1000 + number, 24)[0]["content"]}]

        people = [begin(number) for number in range(8)]
        for each in people:
            await turn(each, len(people))
        second = [await turn(each, 20) for each in people]
        assert sum(reuse["cached_tokens"] for reuse in second) > 0.9 * sum(r["achievable_tokens"] for r in second)
        await house.do(lambda cache: cache.faults.switch(["refuse_publish"]))
        people = [begin(100 + number) for number in range(8)]
        for number, each in enumerate(people):
            assert (await turn(each, 30 + number))["achievable_tokens"] == 0
        assert (await house.get("/health"))["reuse"] == "healthy"
        missed = 0
        while (await house.get("/health"))["reuse"] != "degraded":
            reuse = await turn(people[missed], 40 + missed)
            assert reuse["cached_tokens"] < reuse["achievable_tokens"]
            assert max(reuse["lost"], key=reuse["lost"].__getitem__) == "publish_skipped"
            missed += 1
            assert missed <= 5
        assert (await house.client.get("/readyz?strict=reuse")).status_code == 503
        found = insight_of(await house.told(), "prefix.reuse_degraded")
        assert "Nothing had needed the room" in found["statement"]
