"""How long work takes on a device: CUDA events around each round, contenders in turns, medians with their spread."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch

Work = Callable[[], object]


def seconds_of_each(
    works: Mapping[str, Work], device: torch.device, *, rounds: int = 15, warm_up: int = 3
) -> dict[str, list[float]]:
    """`rounds` timings of each of `works`, in turns; who goes first changes with each round."""
    for work in works.values():
        for _ in range(warm_up):
            work()
    taken: dict[str, list[float]] = {name: [] for name in works}
    names = list(works)
    for i in range(rounds):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            taken[name].append(_seconds_of(works[name], device))
    return taken


def seconds_of(work: Work, device: torch.device, *, rounds: int = 15, warm_up: int = 3) -> list[float]:
    """`rounds` timings of one work."""
    return seconds_of_each({"": work}, device, rounds=rounds, warm_up=warm_up)[""]


def _seconds_of(work: Work, device: torch.device) -> float:
    """On a GPU the time between two events in its stream, so that it holds what the host was late with, and no more."""
    if device.type != "cuda":
        started = time.perf_counter()
        work()
        return time.perf_counter() - started
    begin, end = _event(), _event()
    torch.cuda.synchronize(device)
    begin.record()
    work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
