"""What matching and admitting a long prompt costs beside few and beside many remembered prompts."""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
import tracemalloc

from rich.console import Console
from rich.table import Table

from cache import CacheOptions, CaptureTicket, CheckpointKind, ContextCache, Frontier

ENTRIES = (100, 10_000, 100_000)
PROMPT_TOKENS = 32_768
_ENTRY_TOKENS = 40
_VOCABULARY = 50_000


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench cache_scale", description=__doc__)
    parser.add_argument("--page-size", type=int, default=64, help="tokens in a page (default 64)")
    parser.add_argument("--rounds", type=int, default=100, help="prompts that are matched and admitted (default 100)")
    options = parser.parse_args(arguments)
    table = Table(title=f"a prompt of {PROMPT_TOKENS:,} tokens, pages of {options.page_size}: medians")
    for name in ("remembered", "match", "admit", "both", "to the first", "bytes of each"):
        table.add_column(name, justify="right")
    first: float | None = None
    for entries in ENTRIES:
        size_bytes = measure_size(entries, options.page_size)
        match_ms, admit_ms = measure(entries, options.page_size, options.rounds)
        both = match_ms + admit_ms
        first = first or both
        table.add_row(
            f"{entries:,}",
            f"{match_ms:.2f} ms",
            f"{admit_ms:.2f} ms",
            f"{both:.2f} ms",
            f"{both / first:.2f}",
            f"{size_bytes:,.0f}",
        )
    Console().print(table)
    return 0


def measure(entries: int, page_size: int, rounds: int) -> tuple[float, float]:
    """Milliseconds of a match and of an admission of a long prompt that is known but for its last token."""
    cache = remember(entries, page_size)
    rng, now = random.Random(1), float(entries)
    prompt = tuple(rng.randrange(_VOCABULARY) for _ in range(PROMPT_TOKENS - 1))
    serve(cache, "known", prompt, now)
    gc.collect()
    matches: list[float] = []
    admissions: list[float] = []
    for number in range(rounds):
        again = (*prompt, number)
        started = time.perf_counter()
        match = cache.match("again", "", again)
        matched = time.perf_counter()
        lease = cache.admit(match, len(again), (), now + number)
        admitted = time.perf_counter()
        if lease is None or lease.cached_tokens < len(prompt) - 1:
            raise AssertionError("the long prompt was not remembered")
        cache.abort(lease, again, 0, now + number)
        matches.append(matched - started)
        admissions.append(admitted - matched)
    return statistics.median(matches) * 1e3, statistics.median(admissions) * 1e3


def measure_size(entries: int, page_size: int) -> float:
    """Bytes of the cache's own books for each remembered prompt, its tokens included."""
    gc.collect()
    tracemalloc.start()
    cache = remember(min(entries, ENTRIES[1]), page_size)
    size_bytes, _peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return size_bytes / len(cache.tiers.store)


def remember(entries: int, page_size: int) -> ContextCache:
    """A cache that remembers so many short prompts, of which nothing gives way."""
    pages = entries * (_ENTRY_TOKENS // page_size + 1) + 2 * PROMPT_TOKENS // page_size + 64
    cache = ContextCache(CacheOptions(page_size, pages, entries + 8, has_state=True))
    rng = random.Random(0)
    for number in range(entries):
        prompt = tuple(rng.randrange(_VOCABULARY) for _ in range(_ENTRY_TOKENS))
        serve(cache, f"r{number}", prompt, float(number))
    return cache


def serve(cache: ContextCache, name: str, prompt: tuple[int, ...], now: float) -> None:
    """One request that leaves a checkpoint at its last token but one."""
    wanted = (Frontier(len(prompt) - 1, CheckpointKind.PRIVATE_TURN_CLOSURE),)
    lease = cache.admit(cache.match(name, "", prompt), len(prompt), wanted, now)
    if lease is None:
        raise AssertionError("there is room for every prompt")
    ticket = cache.capture(lease, wanted[0])
    if isinstance(ticket, CaptureTicket):
        cache.publish(ticket, now)
    cache.abort(lease, prompt, 0, now)
