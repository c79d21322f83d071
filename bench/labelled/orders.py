"""Streams of every order: who asks next, how many people there are for the room there is, and each fault among them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product

from bench.labelled import traffic
from bench.labelled.drive import Setting
from bench.labelled.faults import NEEDS_HOST, OF_ONE_NAMESPACE, FaultKind
from bench.labelled.streams import STATE_MIB, Stream
from bench.labelled.traffic import Order, Writer
from bench.replay.cost_model import load_preset
from bench.replay.sizes import Sizes

PAGE_TOKENS = 128
SHARES = (0.25, 0.5, 1.0, 1.5, 2.0)
"""People, for each conversation that fits."""
_ROOMS = ((8, 0), (2, 12), (3, 8), (12, 0))
"""Checkpoints on the device, and state images in host memory."""
_EVERY_SECONDS = 4.0
_REQUESTS_BEFORE = 4
"""Of each person, before the fault."""
_REQUESTS_AFTER = 60
_ROUNDS_AFTER = 2
_ROUNDS_OF_ONE_AFTER = 8
"""Where one of many suffers, until that one has asked some times."""
KINDS = tuple(kind for kind in FaultKind if kind is not FaultKind.NEWEST_LEAVE)


def order_streams(seeds: range) -> Iterator[Stream]:
    """Each fault in each order it goes with, once for each seed; with another number of people, and other room, each
    time, so that all of them have their turn."""
    for seed in seeds:
        for number, (kind, order) in enumerate(product(KINDS, Order)):
            if (order is Order.ONE_OF_MANY) is not (kind in OF_ONE_NAMESPACE):
                continue
            yield order_stream(kind, order, SHARES[(number + seed) % len(SHARES)], number // len(SHARES) + seed, seed)


def calm_streams(seeds: range) -> Iterator[Stream]:
    """Each order with each number of people, and nothing wrong."""
    for seed, order, (number, share) in product(seeds, Order, enumerate(SHARES)):
        yield order_stream(None, order, share, number + seed, seed)


def order_stream(kind: FaultKind | None, order: Order, share: float, room: int, seed: int) -> Stream:
    """`share` is people for each conversation that fits; `room` chooses the sizes."""
    rooms = [each for each in _ROOMS if each[1]] if kind in NEEDS_HOST else _ROOMS
    device, host = rooms[room % len(rooms)]
    name = f"{order} {share} {device} {host} {seed}"
    rng = random.Random(name)
    people = max(2, round(share * max(device, host)))
    before = max(_REQUESTS_BEFORE * people, 40)
    rounds = _ROUNDS_OF_ONE_AFTER if order is Order.ONE_OF_MANY else _ROUNDS_AFTER
    calls = traffic.in_order(
        Writer(name),
        order,
        people=people,
        requests=before + _REQUESTS_AFTER + rounds * people,
        every_seconds=_EVERY_SECONDS,
        turns=3 if order is Order.LOCKSTEP else rng.choice((6, 12)),
        system_tokens=rng.choice((0, 400)) if kind is not FaultKind.ONLY_SHARED else 1500,
        is_system_shared=kind is FaultKind.ONLY_SHARED,
    )
    concurrency = rng.choice((1, 2))
    sizes = Sizes(
        max_concurrency=concurrency,
        device_state_slots=device,
        host_state_slots=host or None,
        host_cache_mib=host * STATE_MIB * 2,
        kv_pages=(device + concurrency) * 50,
        page_tokens=PAGE_TOKENS,
    )
    setting = Setting(sizes, load_preset("27b-hybrid"), self_heal=kind is FaultKind.LEAK_HOST_HEALED)
    label = f"{order}, {share:g} times as many as fit" if kind is None else str(kind)
    return Stream(label, seed, tuple(calls), setting, kind, calls[before].at_seconds - 0.1, order=order)
