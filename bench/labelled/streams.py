"""The streams by name: random traffic, sizes and moments, each the same whenever it is made again from its number."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from bench.labelled import traffic
from bench.labelled.drive import Setting
from bench.labelled.faults import NEEDS_HOST, OF_ONE_NAMESPACE, FaultKind
from bench.labelled.traffic import Order, Writer
from bench.replay.agentic import Traffic, make_calls
from bench.replay.conversations import Call
from bench.replay.cost_model import load_preset
from bench.replay.sizes import Sizes

_HOURS = 0.5
_PAGE_TOKENS = 128
_UNIT_MIB = 8
"""A page of 128 tokens; a state image takes 19 of them."""
STATE_MIB = 19 * _UNIT_MIB
_SIZES = ((2, 2), (4, 0), (4, 8), (3, 6), (8, 12), (12, 24))
"""Checkpoints on the device, and state images in host memory."""


@dataclass(frozen=True, slots=True)
class Stream:
    """Calls and the daemon that serves them; `fault` is what goes wrong at `onset_seconds`."""

    name: str
    seed: int
    calls: tuple[Call, ...]
    setting: Setting
    fault: FaultKind | None = None
    onset_seconds: float = 0.0
    ends_seconds: float | None = None
    """When the cause of the fault is gone again."""
    restarts_seconds: float | None = None
    """When a new daemon takes over, which inherits nothing."""
    order: Order | None = None
    """Who asks next, where that is what the stream is about."""

    @property
    def twin(self) -> Stream:
        """The same without the fault."""
        return replace(self, fault=None)


def faulty_streams(seeds: range) -> Iterator[Stream]:
    """Each kind of fault, once for each seed."""
    for kind in FaultKind:
        if kind is not FaultKind.NEWEST_LEAVE:
            yield from (faulty_stream(kind, seed) for seed in seeds)


def hard_streams(seeds: range) -> Iterator[Stream]:
    """Where the detector is known to be slow or blind; see docs/insights.md."""
    for seed in seeds:
        yield faulty_stream(FaultKind.NEWEST_LEAVE, seed)


def healthy_streams(seeds: range) -> Iterator[Stream]:
    """Each kind of harmless traffic, once for each seed."""
    for name in HEALTHY:
        for seed in seeds:
            yield healthy_stream(name, seed)


def recovering_streams(seeds: range) -> Iterator[Stream]:
    """Faults of the cache's own whose cause goes away."""
    for kind in (FaultKind.REFUSE_PUBLISH, FaultKind.DROP_STATE):
        for seed in seeds:
            stream = faulty_stream(kind, seed)
            yield replace(stream, onset_seconds=_HOURS * 3600 * 0.3, ends_seconds=_HOURS * 3600 * 0.5)


def faulty_stream(kind: FaultKind, seed: int) -> Stream:
    rng = random.Random(f"{kind} {seed}")
    device, host = rng.choice([each for each in _SIZES if each[1] >= 2] if kind in NEEDS_HOST else _SIZES)
    if kind is FaultKind.LEAK_HOST_HEALED or kind is FaultKind.LEAK_HOST:
        device = 2
    setting = _setting(rng, device, host, self_heal=kind is FaultKind.LEAK_HOST_HEALED)
    calls = _busy(rng, f"{kind} {seed}", max(device, host), kind)
    return Stream(str(kind), seed, tuple(calls), setting, kind, _HOURS * 3600 * rng.uniform(0.25, 0.55))


def healthy_stream(name: str, seed: int) -> Stream:
    rng = random.Random(f"{name} {seed}")
    device, host = rng.choice(_SIZES)
    setting = _setting(rng, device, host, self_heal=True)
    stream = HEALTHY[name](rng, Writer(f"{name} {seed}"), setting)
    return replace(stream, name=name, seed=seed)


def _setting(rng: random.Random, device: int, host: int, *, self_heal: bool) -> Setting:
    concurrency = rng.choice((2, 4, 8))
    sizes = Sizes(
        max_concurrency=concurrency,
        device_state_slots=device,
        host_state_slots=host or None,
        host_cache_mib=host * STATE_MIB * 2,
        kv_pages=(device + concurrency) * 50,
        page_tokens=_PAGE_TOKENS,
    )
    return Setting(sizes, load_preset("27b-hybrid"), self_heal=self_heal)


def _busy(rng: random.Random, name: str, fits: int, kind: FaultKind) -> list[Call]:
    """Conversations that go on, some of which a plain cache of this size would keep, and what else happens."""
    writer = Writer(name)
    people = max(2, round(fits * rng.uniform(0.4, 0.9)))
    namespaces = tuple(f"ns{number}" for number in range(rng.randint(3, 5)))
    is_shared = kind is FaultKind.ONLY_SHARED
    parts = [
        traffic.chats(
            writer,
            hours=_HOURS,
            people=people,
            think_seconds=rng.choice((10.0, 20.0, 40.0)),
            system_tokens=2000 if is_shared else rng.choice((0, 0, 600)),
            namespaces=namespaces if kind in OF_ONE_NAMESPACE else ("",),
        )
    ]
    if kind in NEEDS_HOST or rng.random() < 0.4:
        parts.append(traffic.one_shots(writer, hours=_HOURS, every_seconds=rng.choice((8.0, 15.0))))
    if rng.random() < 0.3:
        parts.append(traffic.tool_loops(writer, hours=_HOURS, agents=1))
    return traffic.merge(*parts)


# -- harmless traffic


def _of(calls: list[Call], setting: Setting) -> Stream:
    return Stream("", 0, tuple(calls), setting)


def _cold(rng: random.Random, writer: Writer, setting: Setting) -> Stream:
    tokens = rng.choice((60.0, 400.0, 2000.0))
    return _of(traffic.one_shots(writer, hours=_HOURS, every_seconds=4.0, tokens=tokens), setting)


def _cycle(ratio: tuple[float, float]) -> Callable[[random.Random, Writer, Setting], Stream]:
    def make(rng: random.Random, writer: Writer, setting: Setting) -> Stream:
        fits = max(setting.sizes.device_state_slots, setting.sizes.host_state_slots or 0)
        conversations = max(2, round(fits * rng.uniform(*ratio)))
        return _of(traffic.cycle(writer, hours=_HOURS, conversations=conversations, every_seconds=5.0), setting)

    return make


def _lockstep(rng: random.Random, writer: Writer, setting: Setting) -> Stream:
    """All conversations end at once, and as many new ones begin."""
    fits = max(setting.sizes.device_state_slots, setting.sizes.host_state_slots or 0)
    conversations = max(2, round(fits * rng.uniform(0.7, 1.1)))
    calls = traffic.cycle(writer, hours=_HOURS, conversations=conversations, every_seconds=3.0, locked=True)
    return _of(calls, setting)


def _crowd(rng: random.Random, writer: Writer, setting: Setting) -> Stream:
    fits = max(setting.sizes.device_state_slots, setting.sizes.host_state_slots or 0)
    people = max(4, round(fits * rng.uniform(1.5, 3.0)))
    system = rng.choice((0, 1500))
    return _of(traffic.chats(writer, hours=_HOURS, people=people, think_seconds=60.0, system_tokens=system), setting)


def _crowd_without_states(rng: random.Random, writer: Writer, setting: Setting) -> Stream:
    sizes = replace(setting.sizes, kv_pages=rng.choice((60, 120, 250)), host_cache_mib=rng.choice((0, 500)))
    plain = replace(setting, sizes=sizes, model=replace(setting.model, state_bytes=0))
    calls = traffic.chats(writer, hours=_HOURS, people=rng.randint(4, 12), think_seconds=30.0)
    return _of(calls, plain)


def _short(rng: random.Random, writer: Writer, setting: Setting) -> Stream:
    """Most of them are in host memory, from where it takes longer to copy them than to compute them."""
    sizes = replace(setting.sizes, host_state_slots=40, host_cache_mib=80 * STATE_MIB)
    calls = traffic.repeats(writer, hours=_HOURS, prompts=rng.randint(10, 30), every_seconds=4.0, tokens=24.0)
    return _of(calls, replace(setting, sizes=sizes))


def _flood(rng: random.Random, writer: Writer, setting: Setting) -> Stream:
    """Chats, and in the middle of it a batch of one-shot prompts."""
    flood = traffic.one_shots(writer, hours=_HOURS, every_seconds=1.5, tokens=1500.0, begin_seconds=700.0)
    calls = traffic.merge(
        traffic.chats(writer, hours=_HOURS, people=rng.randint(2, 8), think_seconds=20.0),
        [call for call in flood if call.at_seconds < 1000.0],
    )
    return _of(calls, setting)


def _bursts(rng: random.Random, writer: Writer, setting: Setting) -> Stream:
    """Chats, and every minute more requests at once than can run, which take slots and pages and give them back."""
    concurrency = setting.sizes.max_concurrency
    calls = traffic.merge(
        traffic.chats(writer, hours=_HOURS, people=rng.randint(2, 8), think_seconds=20.0),
        traffic.bursts(writer, hours=_HOURS, every_seconds=rng.choice((20.0, 60.0)), calls_each=2 * concurrency),
    )
    return _of(calls, setting)


def _passing(rng: random.Random, writer: Writer, setting: Setting) -> Stream:
    """Short chats, and prompts of half the pages that come and go between two looks at the pools."""
    sizes = Sizes(
        max_concurrency=2,
        device_state_slots=2,
        host_state_slots=None,
        host_cache_mib=rng.choice((100, 300)),
        kv_pages=150,
        page_tokens=16,
    )
    model = replace(setting.model, state_bytes=20 * 16 * setting.model.kv_bytes_per_token)
    calls = traffic.passing(writer, requests=260, every_seconds=0.15, tokens=1150)
    return _of(calls, replace(setting, sizes=sizes, model=model))


def _deploy(rng: random.Random, writer: Writer, setting: Setting) -> Stream:
    """A new daemon takes over in the middle of conversations."""
    calls = traffic.chats(writer, hours=_HOURS, people=rng.randint(2, 10), think_seconds=20.0, system_tokens=1000)
    return replace(_of(calls, setting), restarts_seconds=_HOURS * 3600 * rng.uniform(0.3, 0.7))


def _night(rng: random.Random, writer: Writer, setting: Setting) -> Stream:
    """Nobody asks anything for some hours; then they go on where they were, or begin anew."""
    calls = traffic.chats(writer, hours=_HOURS / 2, people=rng.randint(2, 8), think_seconds=20.0)
    hours = rng.uniform(3, 10)
    morning = traffic.chats(writer, hours=_HOURS / 2, people=rng.randint(2, 8), think_seconds=20.0)
    late = [replace(call, at_seconds=call.at_seconds + hours * 3600) for call in morning]
    back = [
        replace(call, thread=f"{call.thread} back", at_seconds=call.at_seconds + hours * 3600)
        for call in calls[-20:]
        if rng.random() < 0.5
    ]
    return _of(traffic.merge(calls, late, back), setting)


def _sub_agents(rng: random.Random, writer: Writer, setting: Setting) -> Stream:
    return _of(traffic.fan_out(writer, hours=_HOURS, every_seconds=rng.choice((60.0, 150.0))), setting)


def _forks(rng: random.Random, writer: Writer, setting: Setting) -> Stream:
    return _of(traffic.forks(writer, hours=_HOURS, people=rng.randint(2, 8)), setting)


def _rewriting(rng: random.Random, writer: Writer, setting: Setting) -> Stream:
    calls = traffic.chats(
        writer, hours=_HOURS, people=rng.randint(2, 6), think_seconds=20.0, injects=True, system_tokens=800
    )
    return _of(calls, setting)


def _agentic(rng: random.Random, _writer: Writer, setting: Setting) -> Stream:
    """Tool loops, sub-agents, edits, forks, retries, bursts: see `dalsegno replay`."""
    sizes = replace(setting.sizes, kv_pages=6000, host_cache_mib=12_000, max_concurrency=8)
    calls = make_calls(Traffic(sessions=rng.randint(4, 14), hours=0.6, seed=rng.randrange(1000)))
    return _of(calls, replace(setting, sizes=sizes))


def _popular(rng: random.Random, writer: Writer, setting: Setting) -> Stream:
    """Prompts that are sent again at random, more of them than fit."""
    fits = max(setting.sizes.device_state_slots, setting.sizes.host_state_slots or 0)
    prompts = round(fits * rng.uniform(1.5, 4.0))
    return _of(traffic.repeats(writer, hours=_HOURS, prompts=prompts, every_seconds=4.0, tokens=600.0), setting)


def _salted(rng: random.Random, writer: Writer, setting: Setting) -> Stream:
    """Many namespaces, each of which asks little."""
    namespaces = tuple(f"salt{number}" for number in range(40))
    calls = traffic.chats(writer, hours=_HOURS, people=rng.randint(4, 10), think_seconds=20.0, namespaces=namespaces)
    return _of(calls, setting)


HEALTHY: dict[str, Callable[[random.Random, Writer, Setting], Stream]] = {
    "cold prompts": _cold,
    "a working set half of the pools": _cycle((0.3, 0.7)),
    "a working set as large as the pools": _cycle((0.8, 1.2)),
    "a working set twice the pools": _cycle((1.5, 2.5)),
    "a working set four times the pools": _cycle((3.0, 5.0)),
    "all conversations end at once, and as many new ones begin": _lockstep,
    "more people than fit": _crowd,
    "more people than fit, a model without states": _crowd_without_states,
    "prompts below the reuse unit": _short,
    "popular prompts, more than fit": _popular,
    "a flood of one-shot prompts": _flood,
    "bursts of more than can run": _bursts,
    "prompts of half the pages that come and go within a second": _passing,
    "a deploy in the middle": _deploy,
    "an idle night": _night,
    "sub-agents fanned out": _sub_agents,
    "forks of long chats": _forks,
    "a client that rewrites its history": _rewriting,
    "many namespaces": _salted,
    "agentic work": _agentic,
}
"""By name; each makes a stream from chance."""
