"""`python -m bench soak`: the real daemon with pools that overflow all the time, under agentic traffic."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import httpx

from bench.private_daemon import private_daemon
from bench.soak.checks import growth
from bench.soak.client import SoakClient
from bench.soak.observer import Sample, describe, median, processor_seconds
from bench.soak.plot import draw
from bench.soak.run import Soak
from engine.errors import EngineError
from server.configuration import resolve, to_toml
from server.settings import all_keys

SETTLING_REQUESTS = 1500
"""Memory grows until every pool, ring and buffer has been full: what comes before is no leak."""

_TELL_SECONDS = 5.0
_PAUSES_COMPARED = 3
_LOGGED_LINES = 20
_NEARLY_FULL = 0.95

_ONLY_IN_FILE = ("counters", "resident_bytes_at_pauses")

_SMALL = {
    "engine.max_concurrency": "4",
    "engine.max_pending_requests": "8",
    "engine.max_context": "1024",
    "engine.prefill_chunk": "128",
    "cache.page_size": "16",
    "cache.kv_pages": "160",
    "cache.device_state_slots": "4",
    "cache.host_cache_mib": "32",
    "ops.log_level": "warning",
}
"""Less than the live sessions need, in every pool."""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench soak", description=__doc__)
    parser.add_argument("model", nargs="?", default="demo", help="a folder, a hub id, or a short name (default demo)")
    parser.add_argument("--requests", type=int, default=3000, help="how many to send (default 3000)")
    parser.add_argument("--workers", type=int, default=8, help="clients at the same time (default 8)")
    parser.add_argument("--seed", type=int, default=0, help="the same seed asks the same")
    parser.add_argument("--kv-cache-dtype", choices=["auto", "fp8"], default="auto", help="how the daemons store KV")
    parser.add_argument("--out", type=Path, default=Path("runs/soak"), help="folder for the plot and the figures")
    options = parser.parse_args(arguments)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    before = signal.signal(signal.SIGTERM, lambda _number, _frame: signal.raise_signal(signal.SIGINT))
    try:
        return _soak(options)
    except KeyboardInterrupt:
        print("stopped; the daemons have ended", file=sys.stderr)
        return 130
    except EngineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 3
    finally:
        signal.signal(signal.SIGTERM, before)


def _soak(options: argparse.Namespace) -> int:
    keys = {"cache.kv_cache_dtype": options.kv_cache_dtype}
    with (
        private_daemon(_configuration(options.model, keys)) as warm,
        private_daemon(_configuration(options.model, {**keys, "cache.prefix_reuse": "false"})) as cold,
    ):
        soak = Soak(
            SoakClient(warm.url, "soak"),
            SoakClient(cold.url, "cold"),
            warm.pid,
            requests=options.requests,
            workers=options.workers,
            seed=options.seed,
            tell=_Teller(),
        )
        try:
            asyncio.run(soak.run())
        except* httpx.HTTPError as errors:
            soak.findings.breach([f"the daemon did not answer: {errors.exceptions[0]!r}"])
        finally:
            # Also after Ctrl-C: what was seen so far is worth a look.
            breaches = _report(soak, options)
            if breaches:
                print("the last that the daemon logged:", *_last_lines(warm.log), sep="\n")
    return 1 if breaches else 0


def _last_lines(log: Path) -> list[str]:
    return log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOGGED_LINES:]


class _Teller:
    """Prints a line now and then. Mutable."""

    def __init__(self) -> None:
        self._told_at = -_TELL_SECONDS

    def __call__(self, sample: Sample, total: int) -> None:
        if sample.seconds - self._told_at >= _TELL_SECONDS or sample.requests >= total:
            self._told_at = sample.seconds
            print(describe(sample, total), flush=True)


def _report(soak: Soak, options: argparse.Namespace) -> list[str]:
    """Print and write what was found; returns the breaches."""
    findings, samples = soak.findings, soak.observer.samples
    breaches = [
        *findings.breaches,
        *findings.retries.breaches(),
        *memory_breaches(findings.pauses, options.requests),
    ]
    figures = {
        "requests": soak.sent,
        "seconds": round(soak.seconds, 1),
        "requests_per_second": round(soak.sent / soak.seconds, 1),
        "processor_seconds_of_the_daemon": round(processor_seconds(soak.observer.pid), 1),
        "answers": asdict(findings.account),
        "hit_rate": round(findings.account.cached_tokens / max(findings.account.prompt_tokens, 1), 4),
        "left_by_their_clients": findings.left,
        "refused_on_purpose": findings.refused,
        "overloaded": findings.overloaded,
        "sent_again_under_load": findings.retries.total,
        "missed_when_sent_again": findings.retries.missed,
        "compared_with_a_cold_daemon": findings.compared,
        "audits": findings.audits,
        "resets": findings.resets,
        "resets_with_something_in_use": findings.resets_with_something_in_use,
        "resident_bytes_at_pauses": findings.pauses,
        "lowest_and_highest_occupancy": occupancy_ranges(samples),
        "counters": soak.observer.counters(),
        "breaches": breaches,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "soak.json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    draw(samples, options.out / "soak.png", f"soak of {soak.sent:,} requests, seed {options.seed}")
    for name, value in figures.items():
        if name not in _ONLY_IN_FILE:
            print(f"{name.replace('_', ' ')}: {len(value) if isinstance(value, list) else value}")
    print(f"the plot is {options.out / 'soak.png'}; all figures are in soak.json beside it")
    for line in breaches:
        print(f"BREACH: {line}")
    print("the soak failed" if breaches else "nothing was found to be wrong")
    return breaches


def memory_breaches(pauses: Sequence[tuple[int, int]], requests: int) -> list[str]:
    """Whether the daemon grew between the first tenth, or when it had settled, and the end; nothing is said of a run
    that is too short. `pauses`: requests sent and resident bytes."""
    settled = [rss for sent, rss in pauses if sent >= max(requests / 10, SETTLING_REQUESTS)]
    if len(settled) < 2 * _PAUSES_COMPARED:
        return []
    grown = growth(median(settled[:_PAUSES_COMPARED]), median(settled[-_PAUSES_COMPARED:]))
    return [grown] if grown else []


def occupancy_ranges(samples: Sequence[Sample]) -> dict[str, tuple[float, float]]:
    """By pool, from the first time that it was nearly full: it must breathe."""
    ranges = {}
    for pool in samples[-1].occupied if samples else ():
        shares = [sample.occupied.get(pool, 0.0) for sample in samples]
        full = next((place for place, share in enumerate(shares) if share > _NEARLY_FULL), 0)
        ranges[pool] = (round(min(shares[full:]), 3), round(max(shares[full:]), 3))
    return ranges


def _configuration(model: str, more: dict[str, str]) -> str:
    known = {key.dotted for key in all_keys()}
    flags = {"server.model": model, **_SMALL, **more}
    resolved = resolve({name: value for name, value in flags.items() if name in known}, environ={})
    return to_toml(resolved.settings, resolved.origins)
