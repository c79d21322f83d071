"""The first steps of a device, before anybody waits for them: kernels are compiled when they are first called."""

from __future__ import annotations

import logging
from time import perf_counter

import numpy as np

from engine.errors import BackendUnavailableError
from engine.memory import MemoryPlan
from engine.plan import Segment, StepPlan
from engine.progress import track
from engine.request import SamplingParams
from engine.runner import Runner

_GREEDY = SamplingParams(temperature=0.0, seed=0)
_SAMPLED = SamplingParams(temperature=1.0, top_k=20, top_p=0.9, min_p=0.05, seed=0)
_SHORT_TOKENS = 65
"""More than a chunk of the gated delta rule, and more than a page of the automatic size on a GPU."""

logger = logging.getLogger("dalsegno.engine")


def warm_up(runner: Runner, memory: MemoryPlan) -> None:
    """Run each kind of step once: a whole chunk of a prompt, a decode, a decode beside a short prompt.

    To be called while no sequence holds a page or a slot: it writes to the first ones, which nobody reads before
    writing there. Raises BackendUnavailableError when a step fails: all of a daemon's would.
    """
    began = perf_counter()
    most = memory.max_context_tokens - 1
    longest, short = min(memory.prefill_chunk, most), min(_SHORT_TOKENS, most)
    steps = {
        "prefill": [_segment(memory, 0, longest, _SAMPLED)],
        "decode": [_segment(memory, longest, longest + 1, _GREEDY)],
    }
    pages = _pages(memory, longest + 1)
    if pages + _pages(memory, short) <= memory.kv_pages and memory.state_slots > 1:
        beside = _segment(memory, 0, short, _SAMPLED, slot=1, first_page=pages)
        steps["mixed step"] = [_segment(memory, longest, longest + 1, _GREEDY), beside]
    with track("warming up", len(steps), unit="steps") as advance:
        for name, segments in steps.items():
            try:
                runner.run(StepPlan(tuple(segments)))
            except Exception as error:
                raise BackendUnavailableError(
                    runner.backend_name, f"the first {name} failed ({type(error).__name__}: {error})"
                ) from error
            advance(1)
    logger.info("warmed up in %.1f s", perf_counter() - began)


def _pages(memory: MemoryPlan, tokens: int) -> int:
    return -(-tokens // memory.page_size)


def _segment(
    memory: MemoryPlan, start: int, end: int, sampling: SamplingParams, slot: int = 0, first_page: int = 0
) -> Segment:
    return Segment(
        request_id=f"warm-up-{slot}",
        token_ids=(0,) * (end - start),
        start=start,
        page_ids=np.arange(first_page, first_page + _pages(memory, end), dtype=np.int32),
        state_slot=slot,
        is_sampled=True,
        sampling=sampling,
    )
