"""The engine on a tiny hybrid model: answers are the same whatever happens around them, and every exit is clean."""

import asyncio
import gc
import random
import threading

import pytest

from engine.engine import Engine, EngineOptions, EngineStatus, FinishReason, GenerationRequest, SamplingParams
from engine.errors import (
    ContextLengthExceededError,
    EngineUnavailableError,
    QueueTimeoutError,
    RequestError,
    ServerOverloadedError,
)
from engine.runner import Runner
from engine.scheduler import Scheduler
from tests.waiting import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

PROMPTS = [tuple(random.Random(length).choices(range(256), k=length)) for length in (1, 3, 31, 32, 33, 70, 100, 2)]


def request(prompt, name="r", max_tokens=12, **sampling) -> GenerationRequest:
    return GenerationRequest(
        name, tuple(prompt), SamplingParams(**{"temperature": 0, **sampling}, max_tokens=max_tokens)
    )


async def collect(generation):
    async with asyncio.timeout(PATIENCE_SECONDS):
        deltas = [delta async for delta in generation]
    return deltas, [token_id for delta in deltas for token_id in delta.token_ids]


async def tokens_of(engine, *args, **kwargs) -> list[int]:
    return (await collect(engine.submit(request(*args, **kwargs))))[1]


async def together(engine, prompts, **kwargs) -> list[list[int]]:
    return await asyncio.gather(
        *(tokens_of(engine, prompt, name=f"r{index}", **kwargs) for index, prompt in enumerate(prompts))
    )


async def alone(engine, prompts, **kwargs) -> list[list[int]]:
    return [await tokens_of(engine, prompt, **kwargs) for prompt in prompts]


@pytest.fixture
def gate(monkeypatch):
    """While cleared, steps stand still in the engine thread."""
    opened = threading.Event()
    run = Runner.run

    def gated(self, plan):
        assert opened.wait(timeout=PATIENCE_SECONDS)
        return run(self, plan)

    monkeypatch.setattr(Runner, "run", gated)
    opened.set()
    yield opened
    opened.set()


@pytest.fixture
def faults(monkeypatch):
    """Steps that compute something fail, once each, with the errors that are put in this list."""
    errors: list[Exception] = []
    run = Runner.run

    def faulty(self, plan):
        if errors and plan.segments:
            raise errors.pop(0)
        return run(self, plan)

    monkeypatch.setattr(Runner, "run", faulty)
    return errors


async def test_requests_together_get_the_tokens_that_they_get_alone(running_engine):
    async with running_engine() as engine:
        expected = await alone(engine, PROMPTS)
        assert len({tuple(tokens) for tokens in expected}) > len(PROMPTS) // 2
        assert await together(engine, PROMPTS) == expected


async def test_chunks_change_no_token(running_engine):
    async with running_engine(prefill_chunk=256) as engine:
        expected = await alone(engine, PROMPTS)
    async with running_engine(prefill_chunk=8) as engine:
        assert await together(engine, PROMPTS) == expected


async def test_suspension_changes_no_token_and_repeats_none(running_engine):
    async with running_engine(max_context=124) as engine:
        expected = await alone(engine, PROMPTS[:4], max_tokens=90)
    async with running_engine(kv_pages=40, max_context=124) as engine:
        assert await together(engine, PROMPTS[:4], max_tokens=90) == expected
        assert engine.snapshot().suspensions_total > 0


async def test_sampling_depends_on_seed_and_position_only(running_engine):
    async with running_engine() as engine:
        expected = await alone(engine, PROMPTS, temperature=1.0, seed=7)
        assert await together(engine, PROMPTS, temperature=1.0, seed=7) == expected
        assert await alone(engine, PROMPTS, temperature=1.0, seed=8) != expected


async def test_requests_without_a_seed_differ(running_engine):
    async with running_engine() as engine:
        first, second = await alone(engine, [PROMPTS[3]] * 2, temperature=1.5)
        assert first != second


async def test_a_seed_of_any_size_is_taken(running_engine):
    async with running_engine() as engine:
        assert await tokens_of(engine, PROMPTS[1], temperature=1.0, seed=-(2**80))


async def test_what_former_requests_left_in_memory_changes_nothing(running_engine):
    async with running_engine(prefix_reuse=False) as engine:
        expected = await alone(engine, PROMPTS)
        engine._loop.scheduler.cache.reset()
        state = engine._loop._runner._storage.state
        for tensor in (*state.kv, *state.conv, *state.recurrent):
            tensor.fill_(float("nan"))
        assert await alone(engine, PROMPTS) == expected


async def test_the_pieces_add_up_to_the_decoded_tokens(running_engine):
    async with running_engine() as engine:
        for prompt in PROMPTS:
            deltas, token_ids = await collect(engine.submit(request(prompt, max_tokens=30)))
            assert "".join(delta.text for delta in deltas) == engine.tokenizer.decode(token_ids)


async def test_the_last_piece_tells_reason_usage_and_timings(running_engine):
    async with running_engine() as engine:
        deltas, token_ids = await collect(engine.submit(request(PROMPTS[4], max_tokens=5)))
        last = deltas[-1]
        assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + [FinishReason.LENGTH]
        assert (last.usage.prompt_tokens, last.usage.completion_tokens, len(token_ids)) == (33, 5, 5)
        times = last.timings
        assert times.total_seconds >= times.ttft_seconds >= times.queue_seconds >= 0
        assert times.decode_seconds == pytest.approx(times.total_seconds - times.ttft_seconds)


async def test_a_stop_token_ends_the_answer_and_is_not_in_it(running_engine):
    async with running_engine() as engine:
        expected = await tokens_of(engine, PROMPTS[4])
        stop = expected[4]
        deltas, token_ids = await collect(engine.submit(request(PROMPTS[4], stop_token_ids=(stop,))))
        assert token_ids == expected[: expected.index(stop)]
        assert deltas[-1].finish_reason is FinishReason.STOP
        assert deltas[-1].usage.completion_tokens == len(token_ids) + 1


async def test_max_tokens_is_clamped_to_what_the_context_leaves(running_engine):
    async with running_engine(max_context=40) as engine:
        deltas, token_ids = await collect(engine.submit(request(PROMPTS[4], max_tokens=10**9)))
        assert (len(token_ids), deltas[-1].finish_reason) == (7, FinishReason.LENGTH)


async def test_a_prompt_over_the_context_is_refused_at_once(running_engine):
    async with running_engine(max_context=40) as engine:
        with pytest.raises(ContextLengthExceededError, match=r"is 40 tokens\. However, your prompt has 40 tokens"):
            engine.submit(request([1] * 40))


@pytest.mark.parametrize("token_id", [-1, 300])
async def test_a_token_that_the_model_does_not_have_is_refused_before_it_can_fail_a_step(running_engine, token_id):
    async with running_engine() as engine:
        with pytest.raises(RequestError, match=rf"{token_id}.* 0 to 299"):
            engine.submit(request([5, token_id, 5]))


async def test_an_id_in_use_is_refused(running_engine):
    async with running_engine() as engine:
        generation = engine.submit(request(PROMPTS[0]))
        with pytest.raises(RequestError, match="in use"):
            engine.submit(request(PROMPTS[0]))
        await collect(generation)


async def is_cut_short(engine) -> bool:
    """Once nothing is alive: whether the one long answer ended before the context was full."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        await engine._loop.wait_until_empty()
    return engine.snapshot().decode_tokens_total < engine.max_context_tokens - len(PROMPTS[5]) - 1


async def first_delta(engine, **kwargs):
    generation = engine.submit(request(PROMPTS[5], max_tokens=10_000, **kwargs))
    await anext(generation)
    return generation


async def test_leaving_the_stream_cancels_the_request(running_engine):
    async with running_engine() as engine:
        async with await first_delta(engine):
            assert engine.snapshot().decoding == 1
        assert await is_cut_short(engine)


async def test_a_stream_that_is_read_to_its_end_is_not_cut_short(running_engine):
    async with running_engine() as engine:
        await collect(await first_delta(engine))
        assert not await is_cut_short(engine)


async def test_cancelling_the_consumer_s_task_cancels_the_request(running_engine):
    async with running_engine() as engine:
        started = asyncio.Event()

        async def consume():
            generation = await first_delta(engine)
            started.set()
            async for _ in generation:
                pass

        task = asyncio.create_task(consume())
        await started.wait()
        task.cancel()
        await asyncio.wait([task])
        assert await is_cut_short(engine)


async def test_dropping_the_handle_cancels_the_request(running_engine):
    async with running_engine() as engine:
        generation = await first_delta(engine)
        del generation
        gc.collect()
        assert await is_cut_short(engine)


async def test_a_request_can_be_left_before_it_was_taken_in(running_engine, gate):
    async with running_engine() as engine:
        gate.clear()
        generation = engine.submit(request(PROMPTS[0]))
        await generation.aclose()
        await generation.aclose()
        gate.set()
        await engine._loop.wait_until_empty()
        assert engine.snapshot().steps_total == 0
        with pytest.raises(StopAsyncIteration):
            await anext(generation)


async def test_leaving_an_ended_stream_does_not_cancel_the_next_of_the_same_id(running_engine):
    async with running_engine() as engine:
        former = engine.submit(request(PROMPTS[0]))
        await engine._loop.wait_until_empty()
        later = engine.submit(request(PROMPTS[4]))
        await former.aclose()
        assert len((await collect(later))[1]) == 12


async def test_a_consumer_that_never_reads_costs_no_other(running_engine):
    async with running_engine() as engine:
        idle = engine.submit(request(PROMPTS[3], name="idle"))
        expected = await tokens_of(engine, PROMPTS[3])
        await engine._loop.wait_until_empty()
        deltas, token_ids = await collect(idle)
        assert token_ids == expected
        assert len(deltas) == 1


async def test_a_failing_step_fails_its_requests_with_the_causes_type_and_no_other(running_engine, faults, gate):
    async with running_engine(max_concurrency=1) as engine:
        expected = await tokens_of(engine, PROMPTS[3])
        gate.clear()
        hit, spared = (engine.submit(request(PROMPTS[3], name=name)) for name in ("hit", "spared"))
        faults.append(RuntimeError("bad kernel"))
        gate.set()
        with pytest.raises(EngineUnavailableError, match=r"\(RuntimeError\)") as raised:
            await collect(hit)
        assert "bad kernel" not in str(raised.value)
        assert (await collect(spared))[1] == expected
        snapshot = engine.snapshot()
        assert (snapshot.step_failures_total, snapshot.consecutive_step_failures) == (1, 0)


async def test_tokens_before_a_failure_still_arrive(running_engine, faults):
    async with running_engine() as engine:
        generation = await first_delta(engine)
        faults.append(RuntimeError("bad kernel"))
        with pytest.raises(EngineUnavailableError):
            await collect(generation)


async def test_three_failing_steps_in_a_row_restart_the_loop_with_the_same_answers(running_engine, faults, caplog):
    async with running_engine(max_concurrency=1) as engine:
        expected = await tokens_of(engine, PROMPTS[3])
        faults.extend([OSError("bad kernel"), RuntimeError("bad kernel"), RuntimeError("bad kernel")])
        streams = [engine.submit(request(PROMPTS[3], name=f"r{index}")) for index in range(5)]
        outcomes = await asyncio.gather(*map(collect, streams), return_exceptions=True)
        assert all("(OSError)" in str(error) for error in outcomes[:3]), "the first cause is told"
        assert [tokens for _, tokens in outcomes[3:]] == [expected] * 2
        assert engine.snapshot().loop_restarts_total == 1
        assert "3 steps failed in a row" in caplog.text


async def test_a_fault_of_the_loop_itself_fails_what_is_alive_and_the_loop_goes_on(running_engine, monkeypatch):
    async with running_engine() as engine:
        plan = Scheduler.plan
        monkeypatch.setattr(Scheduler, "plan", lambda self, now: 1 / 0)
        with pytest.raises(EngineUnavailableError, match="ZeroDivisionError"):
            await tokens_of(engine, PROMPTS[0])
        monkeypatch.setattr(Scheduler, "plan", plan)
        assert await tokens_of(engine, PROMPTS[0])


async def test_the_queue_is_bounded(running_engine, gate):
    async with running_engine(max_concurrency=1, max_pending_requests=2) as engine:
        gate.clear()
        accepted = [engine.submit(request(PROMPTS[0], name=f"r{index}")) for index in range(3)]
        with pytest.raises(ServerOverloadedError, match="3 requests are waiting, the queue holds 2"):
            engine.submit(request(PROMPTS[0], name="one too many"))
        gate.set()
        for generation in accepted:
            assert (await collect(generation))[0][-1].finish_reason


async def test_waiting_too_long_is_an_error_of_its_own(running_engine):
    async with running_engine(max_concurrency=1, pending_timeout_s=0) as engine:
        first, second = (engine.submit(request(PROMPTS[0], name=name)) for name in ("first", "second"))
        with pytest.raises(QueueTimeoutError, match="limit is 0"):
            await collect(second)
        assert len((await collect(first))[1]) == 12


async def test_draining_takes_nothing_new_and_finishes_what_runs(running_engine):
    async with running_engine() as engine:
        generation = await first_delta(engine)
        assert not await engine.drain(timeout_s=0)
        assert engine.status is EngineStatus.DRAINING
        with pytest.raises(EngineUnavailableError, match="draining"):
            engine.submit(request(PROMPTS[0], name="late"))
        deltas, _ = await collect(generation)
        assert deltas[-1].finish_reason is FinishReason.LENGTH
        assert await engine.drain()


async def test_stopping_fails_what_still_runs(running_engine):
    async with running_engine() as engine:
        generation = await first_delta(engine)
        waiting = [engine.submit(request(PROMPTS[0], name=f"r{index}")) for index in range(6)]
        await engine.stop()
        await engine.stop()
        for each in (generation, *waiting):
            with pytest.raises(EngineUnavailableError, match="stopped"):
                await collect(each)
        assert engine.status is EngineStatus.STOPPED


async def test_a_loop_that_is_killed_leaves_nobody_waiting(running_engine):
    async with running_engine() as engine:
        generation = await first_delta(engine)
        engine._task.cancel()
        with pytest.raises(EngineUnavailableError, match="stopped"):
            await collect(generation)
        assert engine.status is EngineStatus.STOPPED


async def test_an_engine_that_was_never_started_refuses_and_stops(tiny_folder):
    engine = Engine.load(tiny_folder, EngineOptions(kv_pages=8, page_size=4, max_context=32))
    with pytest.raises(EngineUnavailableError, match="starting"):
        engine.submit(request(PROMPTS[0]))
    await engine.stop()


async def test_an_idle_engine_takes_no_steps_and_its_heart_beats(running_engine):
    async with running_engine() as engine:
        await tokens_of(engine, PROMPTS[0])
        await engine._loop.wait_until_empty()
        steps = engine.snapshot().steps_total
        now = engine._loop._clock() + 1000
        engine._loop._clock = lambda: now
        assert engine.heartbeat_age_seconds() > 900
        engine._loop._has_work.set()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert engine.heartbeat_age_seconds() == 0
        assert engine.snapshot().steps_total == steps


async def test_a_snapshot_counts_what_is_there(running_engine, gate):
    async with running_engine(max_concurrency=2) as engine:
        gate.clear()
        generations = [engine.submit(request(PROMPTS[index], name=f"r{index}")) for index in (4, 5, 6)]
        while engine.snapshot().running == 0:
            await asyncio.sleep(0)
        snapshot = engine.snapshot()
        assert (snapshot.running, snapshot.waiting, snapshot.prefilling, snapshot.decoding) == (2, 1, 2, 0)
        assert snapshot.state_slots.pinned == 2
        gate.set()
        for each in generations:
            await each.aclose()
