"""The simulated daemon: times that can be worked out by hand, and nothing lost whatever presses on the pools."""

from __future__ import annotations

import pytest

from bench.replay.agentic import Traffic, make_calls
from bench.replay.conversations import ConversationTrace
from bench.replay.cost_model import CostModel
from bench.replay.measure import Measurements
from bench.replay.simulation import Simulation
from bench.replay.sizes import Sizes
from bench.replay.summary import summarise
from engine.errors import UnusableOptionError
from tests.bench.replay.traces import ListTrace, request

TINY = CostModel(
    title="tiny",
    kv_bytes_per_token=10,
    state_bytes=100,
    page_tokens=2,
    prefill_chunk_tokens=4,
    prefill_tokens_per_second=100.0,
    decode_step_seconds=0.5,
    decode_step_seconds_per_request=0.0,
    host_to_device_bytes_per_second=1e3,
    device_to_host_bytes_per_second=1e3,
    device_copy_bytes_per_second=1e12,
)
ROOMY = Sizes(
    max_concurrency=4, device_state_slots=8, host_state_slots=None, host_cache_mib=0, kv_pages=200, page_tokens=2
)
TINY_BUT_QUICK = CostModel(
    title="quick",
    kv_bytes_per_token=10,
    state_bytes=5000,
    page_tokens=64,
    prefill_chunk_tokens=2048,
    prefill_tokens_per_second=1e5,
    decode_step_seconds=0.01,
    decode_step_seconds_per_request=0.001,
    host_to_device_bytes_per_second=1e6,
    device_to_host_bytes_per_second=1e6,
    device_copy_bytes_per_second=1e9,
)
SMALL = Sizes(
    max_concurrency=2, device_state_slots=2, host_state_slots=3, host_cache_mib=2, kv_pages=1500, page_tokens=64
)


def _simulate(requests, sizes=ROOMY, model=TINY):
    measurements = Measurements()
    simulation = Simulation(ListTrace(requests), model, sizes, measurements)
    done = []
    simulation.run(done.append)
    assert measurements.violations == []
    assert sum(done) + measurements.refused == len(requests)
    return measurements, simulation


def _with(sizes, **changes):
    return Sizes(**{name: changes.get(name, getattr(sizes, name)) for name in Sizes.__slots__})


def test_a_cold_prompt_takes_what_its_tokens_cost_and_its_answer_what_its_steps_do():
    measurements, _ = _simulate([request(0, "abcdefg.", answer="uvw")])
    (served,) = measurements.served
    assert served.ttft_seconds == pytest.approx(8 / 100)
    assert served.ended_at == pytest.approx(8 / 100 + 2 * 0.5)
    assert (served.prompt_tokens, served.cached_tokens, served.path) == (8, 0, "root")


def test_the_same_prompt_again_computes_its_last_token_only():
    measurements, _ = _simulate([request(0, "abcdefg."), request(1, "abcdefg.", at=9)])
    again = measurements.served[1]
    assert (again.cached_tokens, again.achievable_tokens) == (7, 7)
    assert again.ttft_seconds == pytest.approx(1 / 100)


def test_an_answer_that_is_continued_is_not_computed_again():
    measurements, _ = _simulate([request(0, "abc.", answer="uvw"), request(1, "abc.uvwxyz.", at=9)])
    # All but the answer's last token, which was picked and never computed.
    assert measurements.served[1].cached_tokens == 6


def test_an_answer_that_the_trace_does_not_tell_leaves_no_checkpoint_behind():
    _, simulation = _simulate([request(0, "abc.", output_tokens=6)])
    assert dict(simulation.cache.stats.published) == {"private_turn_closure": 1}


def test_who_comes_when_all_run_waits_for_one_to_end():
    requests = [request(0, "abcd.", answer="xyz", at=0), request(1, "efgh.", answer="x", at=0)]
    measurements, _ = _simulate(requests, _with(ROOMY, max_concurrency=1))
    first, second = measurements.served
    assert second.first_token_at == pytest.approx(first.ended_at + 5 / 100)


def test_a_thread_sends_nothing_before_its_last_answer_is_there():
    requests = [request(0, "abcd.", answer="xyz", at=0, thread="a"), request(1, "abcdef.", at=0.01, thread="a")]
    measurements, _ = _simulate(requests)
    first, second = measurements.served
    assert second.sent_at == first.ended_at


def test_a_prompt_that_can_never_fit_is_refused_and_its_thread_goes_on():
    requests = [request(0, "a" * 500, thread="a"), request(1, "abc.", at=2, thread="a")]
    measurements, _ = _simulate(requests)
    assert measurements.refused == 1
    assert [served.prompt_tokens for served in measurements.served] == [4]


def test_requests_for_the_same_prefix_at_once_compute_it_once():
    requests = [request(number, f"{'p' * 20}{number}.", at=0, stable=20) for number in range(3)]
    measurements, _ = _simulate(requests)
    assert [served.cached_tokens for served in measurements.served] == [0, 20, 20]


def test_what_left_the_device_comes_back_from_host_memory_and_takes_its_time():
    sizes = _with(ROOMY, max_concurrency=1, device_state_slots=1, host_cache_mib=1)
    prompts = ["a" * 40 + ".", "b" * 40 + ".", "c" * 40 + ".", "d" * 40 + "."]
    requests = [request(number, prompt, at=100 * number) for number, prompt in enumerate([*prompts, prompts[0]])]
    measurements, _ = _simulate(requests, sizes)
    last = measurements.served[-1]
    assert (last.cached_tokens, last.host_tokens) == (40, 40)
    # Its pages were still on the device; a state of 100 at 1,000 bytes a second, and one token to compute.
    assert last.ttft_seconds == pytest.approx(0.1 + 0.01)
    assert measurements.moved_bytes["host to device"] == 100


def test_without_host_memory_it_is_lost_and_the_reason_is_told():
    sizes = _with(ROOMY, max_concurrency=1, device_state_slots=1)
    prompts = ["a" * 40 + ".", "b" * 40 + ".", "c" * 40 + ".", "a" * 40 + "."]
    measurements, simulation = _simulate([request(n, p, at=100 * n) for n, p in enumerate(prompts)], sizes)
    assert measurements.served[-1].lost == {"evicted_state": 40}
    assert summarise(measurements, simulation.cache).lost_tokens["evicted_state"] == 40


def test_when_pages_run_out_the_youngest_is_suspended_and_every_request_ends():
    # Two answers that do not fit beside each other.
    requests = [request(number, f"{number}abc.", at=0, output_tokens=100) for number in range(2)]
    measurements, _ = _simulate(requests, _with(ROOMY, kv_pages=80))
    assert measurements.suspensions
    assert len(measurements.served) == 2


@pytest.mark.parametrize("page_tokens", [32, 64])
def test_agentic_traffic_overflows_every_pool_and_nothing_is_lost(page_tokens):
    calls = make_calls(Traffic(sessions=6, hours=0.3, seed=2))
    sizes = _with(SMALL, kv_pages=SMALL.kv_pages * 64 // page_tokens, page_tokens=page_tokens)
    measurements = Measurements()
    Simulation(ConversationTrace("agents", calls), TINY_BUT_QUICK, sizes, measurements).run(lambda done: None)
    assert measurements.violations == []
    assert len(measurements.served) + measurements.refused == len(calls)
    for sample in measurements.samples:
        for counts in sample.pools.values():
            assert counts.free + counts.cached + counts.pinned + counts.in_flight == counts.capacity


def test_the_same_trace_gives_the_same_records():
    calls = make_calls(Traffic(sessions=4, hours=0.2, seed=5))
    runs = []
    for _ in range(2):
        measurements = Measurements()
        Simulation(ConversationTrace("agents", calls), TINY_BUT_QUICK, SMALL, measurements).run(lambda done: None)
        runs.append((measurements.served, measurements.samples, measurements.moved_bytes))
    assert runs[0] == runs[1]


def test_a_page_that_no_symbols_make_up_is_refused():
    with pytest.raises(UnusableOptionError, match=r"--page-size 24 .* 16 tokens are one symbol"):
        Simulation(ConversationTrace("none", []), TINY, _with(ROOMY, page_tokens=24), Measurements())
