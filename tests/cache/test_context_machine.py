"""Random histories against tiny pools: after every step nothing leaks, and reuse is never of wrong bytes."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from cache.context import ContextCache
from cache.demotion import Demotion
from cache.leases import CaptureTicket, RequestLease
from cache.ledger import audit, check
from cache.types import CacheOptions, CheckpointKind, Frontier, Tier

sys.path.insert(0, str(Path(__file__).parent))
from device_model import Device

HISTORIES = int(os.environ.get("DALSEGNO_TEST_HISTORIES", "250"))


class Collision(int):
    """A token whose hash is that of every other token, so that tokens must decide."""

    def __hash__(self) -> int:
        return 7


class Running:
    def __init__(self, lease: RequestLease, prompt: tuple[int, ...]) -> None:
        self.lease = lease
        self.tokens = prompt
        self.computed = lease.cached_tokens


class CacheMachine(RuleBasedStateMachine):
    @initialize(
        page_size=st.sampled_from([1, 2, 4]),
        kv_pages=st.integers(6, 60) | st.integers(14, 30),
        max_running=st.integers(1, 3),
        spare_slots=st.integers(0, 4),
        has_state=st.booleans(),
        collide=st.booleans(),
        host_units=st.sampled_from([0, 6, 30, 60, 100]),
        units_per_state=st.integers(1, 3),
        host_state_cap=st.sampled_from([None, None, None, None, 0, 1, 3]),
        demote_ahead=st.sampled_from([None, 0, 1, 3]),
        ghost_nodes=st.sampled_from([None, 0, 2, 10]),
        demotes_at_once=st.sampled_from([True, True, False]),
        conversations=st.integers(0, 8) | st.just(8),
    )
    def start(
        self,
        page_size,
        kv_pages,
        max_running,
        spare_slots,
        has_state,
        collide,
        host_units,
        units_per_state,
        host_state_cap,
        demote_ahead,
        ghost_nodes,
        demotes_at_once,
        conversations,
    ):
        self.max_running = max_running
        self.token = Collision if collide else int
        slots = max_running + spare_slots if has_state else 0
        options = CacheOptions(
            page_size,
            kv_pages,
            slots,
            has_state,
            host_units=host_units,
            host_units_per_state=units_per_state,
            host_state_cap=host_state_cap,
            page_bytes=10,
            state_bytes=25,
            demote_ahead=demote_ahead,
            ghost_nodes=ghost_nodes,
        )
        self.cache = ContextCache(options)
        self.device = Device(self.cache)
        self.running: dict[str, Running] = {}
        self.demotions: list[Demotion] = []
        self.history: list[tuple[int, ...]] = []
        self.now = 0.0
        self.count = 0
        self.demotes_at_once = demotes_at_once
        for number in range(conversations):
            self.converse(tuple(self.token(t) for t in (number % 3, number, 1, 2, number)))

    def tick(self) -> float:
        self.now += 1.0
        return self.now

    @rule(
        data=st.data(),
        fresh=st.lists(st.integers(0, 2), min_size=1, max_size=8),
        keep=st.sampled_from([100, 100, 100, 0, 3, 5, 8, 13]),
        namespace=st.sampled_from(["a", "a", "a", "b"]),
        to_the_end=st.sampled_from([True, True, False]),
    )
    def arrive(self, data, fresh, keep, namespace, to_the_end):
        if len(self.running) >= self.max_running:
            return
        base = data.draw(st.sampled_from(self.history[-6:])) if self.history else ()
        tokens = tuple(self.token(t) for t in (*base[: min(keep, 40 - len(fresh))], *fresh))
        self.history.append(tokens)
        self.count += 1
        name = f"r{self.count}"
        match = self.cache.match(name, namespace, tokens)
        assert 0 <= match.cached_tokens < len(tokens)
        assert (match.path == "root") == (match.cached_tokens == 0)
        stable = data.draw(st.integers(0, len(tokens) - 1))
        wanted = [
            Frontier(stable, CheckpointKind.SHARED_STABLE_PREFIX),
            Frontier(len(tokens) - 1, CheckpointKind.PRIVATE_TURN_CLOSURE),
        ]
        report = self.cache.report(match, wanted)
        assert report.cached_tokens <= report.achievable_tokens < report.prompt_tokens
        if data.draw(st.integers(0, 7)) == 0:
            self.cache.release(match)
            self.cache.release(match)
            return
        lease = self.cache.admit(match, len(tokens) + 1, wanted, self.tick())
        if lease is None and self.demotions:
            for demotion in self.demotions:
                self.cache.cancel_demotion(demotion)
            self.demotions.clear()
            lease = self.cache.admit(self.cache.match(name, namespace, tokens), len(tokens) + 1, wanted, self.tick())
        if lease is None and not self.running and self.cache.fits_alone(len(tokens) + 1):
            match = self.cache.miss(name, namespace, tokens)
            lease = self.cache.admit(match, len(tokens) + 1, wanted, self.tick())
            assert lease is not None, "alone, a request that fits must get in"
        if lease is None:
            return
        assert lease.report.cached_tokens == lease.cached_tokens
        assert sum(lease.report.source.values()) == lease.cached_tokens
        self.running[name] = Running(lease, tokens)
        if to_the_end:
            self.serve(name)

    def converse(self, tokens, copying="whole"):
        """One request from its arrival to its end, and the demotions after it where they run at once."""
        self.history.append(tokens)
        self.count += 1
        name = f"r{self.count}"
        wanted = [Frontier(len(tokens) - 1, CheckpointKind.PRIVATE_TURN_CLOSURE)]
        lease = self.cache.admit(self.cache.match(name, "a", tokens), len(tokens) + 1, wanted, self.tick())
        if lease is not None:
            self.running[name] = Running(lease, tokens)
            self.serve(name, copying)

    def serve(self, name, copying="whole"):
        if not self.restore(name, copying):
            return
        run = self.running[name]
        while run.computed < len(run.tokens):
            self.advance(run, 8, publish=True)
        self.cache.finish(self.running.pop(name).lease, run.tokens, run.computed, self.tick())
        if self.demotes_at_once:
            self.demote(1000)
            while self.demotions:
                self.end_a_demotion("copied", twice=False)

    @precondition(lambda self: len(self.running) < self.max_running and self.history)
    @rule(
        data=st.data(),
        fresh=st.lists(st.integers(0, 2), max_size=3),
        copying=st.sampled_from([*["whole"] * 6, "half", "failed"]),
    )
    def talk_on(self, data, fresh, copying):
        """An old conversation comes back."""
        base = data.draw(st.sampled_from(self.history[-12:]))
        self.converse((*base[: 40 - len(fresh)], *(self.token(t) for t in fresh)), copying)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), size=st.integers(1, 6), publish=st.booleans())
    def step(self, data, size, publish):
        self.advance(self.running[data.draw(st.sampled_from(sorted(self.running)))], size, publish)

    def advance(self, run, size, publish):
        if run.lease.is_restoring:
            return
        if run.lease.is_resuming or run.computed == 0:
            self.device.resume(run.lease)
        if run.computed == len(run.tokens):
            return
        wanted = [f for f in run.lease.wanted if f.tokens > run.computed]
        end = min([run.computed + size, len(run.tokens), *(f.tokens for f in wanted)])
        tickets = [self.cache.capture(run.lease, f) for f in wanted if f.tokens == end]
        self.device.compute(run.lease, run.tokens, run.computed, end)
        run.computed = end
        for ticket in tickets:
            if not isinstance(ticket, CaptureTicket):
                continue
            self.device.capture(ticket)
            if publish:
                self.cache.publish(ticket, self.tick())
                self.cache.publish(ticket, self.tick())
            else:
                self.cache.discard(ticket)
                self.cache.discard(ticket)

    @precondition(lambda self: any(run.lease.is_restoring for run in self.running.values()))
    @rule(data=st.data(), ending=st.sampled_from(["whole", "whole", "half", "failed"]))
    def restore_one(self, data, ending):
        waiting = sorted(name for name, run in self.running.items() if run.lease.is_restoring)
        self.restore(data.draw(st.sampled_from(waiting)), ending)

    def restore(self, name, ending) -> bool:
        """Whether the request goes on."""
        run = self.running[name]
        if not run.lease.is_restoring:
            return True
        if ending == "whole":
            self.device.run(run.lease.restore)
            self.cache.confirm_restore(run.lease, self.tick())
            return True
        self.device.spoil(run.lease.restore[:1] if ending == "half" else run.lease.restore)
        for _ in range(2):
            self.cache.fail_restore(run.lease, self.tick())
        del self.running[name]
        return False

    @rule(most_bytes=st.sampled_from([0, 1, 40, 1000, 1000]))
    def demote_some(self, most_bytes):
        self.demote(most_bytes)

    def demote(self, most_bytes):
        self.demotions += self.cache.plan_demotions(self.tick(), most_bytes)

    @precondition(lambda self: self.demotions)
    @rule(ending=st.sampled_from(["copied", "copied", "copied", "failed"]), twice=st.booleans())
    def end_one(self, ending, twice):
        self.end_a_demotion(ending, twice)

    def end_a_demotion(self, ending, twice):
        demotion = self.demotions.pop(0)
        if ending == "copied":
            self.device.run(demotion.copies)
        else:
            self.device.spoil(demotion.copies)
        for _ in range(1 + twice):
            if ending == "copied":
                self.cache.confirm_demotion(demotion, self.tick())
            self.cache.cancel_demotion(demotion) if ending == "failed" or twice else None

    @rule(restore_bytes=st.sampled_from([1, 1000, 1000, 1000]), tokens=st.sampled_from([1, 1, 1, 100]))
    def measure(self, restore_bytes, tokens):
        self.cache.costs.saw_restore(restore_bytes, 1.0, self.now)
        self.cache.costs.saw_prefill(tokens, 1.0, self.now)

    @rule(fault=st.sampled_from([None] * 9 + ["refuse_publish", "drop_state"]))
    def switch_faults(self, fault):
        self.cache.faults.switch([fault] if fault else [])

    @precondition(lambda self: self.cache.host.capacity)
    @rule(rarely=st.integers(0, 7))
    def leak_and_heal(self, rarely):
        """While host states leak the books are wrong; an audit mends them."""
        if rarely:
            return
        self.cache.faults.switch(["leak_host_state"])
        self.cache.reset([Tier.HOST])
        self.cache.faults.switch([])
        report = audit(self.cache)
        assert report.remaining == ()
        assert audit(self.cache).violations == ()

    @precondition(lambda self: self.running)
    @rule(data=st.data(), token=st.integers(0, 2))
    def generate(self, data, token):
        run = self.running[data.draw(st.sampled_from(sorted(self.running)))]
        if (
            run.lease.is_restoring
            or run.computed < len(run.tokens)
            or not self.cache.grow(run.lease, len(run.tokens) + 2)
        ):
            return
        run.tokens = (*run.tokens, self.token(token))
        self.device.compute(run.lease, run.tokens, run.computed, run.computed + 1)
        run.computed += 1

    @precondition(lambda self: self.running)
    @rule(data=st.data(), ending=st.sampled_from(["finish", "abort", "fault"]), twice=st.booleans())
    def leave(self, data, ending, twice):
        name = data.draw(st.sampled_from(sorted(self.running)))
        run = self.running.pop(name)
        self.history.append(run.tokens)
        close = self.cache.finish if ending == "finish" else self.cache.abort
        for _ in range(1 + twice):
            computed = 0 if ending == "fault" or run.lease.is_restoring else run.computed
            close(run.lease, run.tokens, computed, self.tick())
            if ending == "fault":
                self.cache.distrust(run.lease)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def leave_in_the_middle_of_a_capture(self, data):
        name = data.draw(st.sampled_from(sorted(self.running)))
        run = self.running[name]
        if run.computed < len(run.tokens) - 1 and not run.lease.is_restoring:
            self.advance(run, 100, publish=True)
            self.cache.capture(run.lease, Frontier(len(run.tokens) - 1, CheckpointKind.PRIVATE_LONG_ANCHOR))
            self.cache.abort(self.running.pop(name).lease, run.tokens, run.computed, self.tick())

    @rule(tiers=st.sets(st.sampled_from([Tier.DEVICE, Tier.HOST])), rarely=st.integers(0, 7))
    def reset(self, tiers, rarely):
        if rarely:
            return
        self.cache.reset(tiers)

    @invariant()
    def nothing_leaks(self):
        if not hasattr(self, "cache"):
            return
        assert check(self.cache) == []
        self.device.poison_free_units()

    def teardown(self):
        if not hasattr(self, "cache"):
            return
        for run in self.running.values():
            computed = 0 if run.lease.is_restoring else run.computed
            self.cache.abort(run.lease, run.tokens, computed, self.tick())
        for demotion in self.demotions:
            self.cache.cancel_demotion(demotion)
        pools = (self.cache.pages, self.cache.slots, self.cache.host)
        assert all(pool.counts().pinned == pool.counts().in_flight == 0 for pool in pools)
        self.cache.reset()
        assert all(pool.free == pool.capacity for pool in pools)
        assert not self.cache.tiers.ghosts.trees


@pytest.mark.parametrize("histories", [HISTORIES])
def test_random_histories_leak_nothing_and_reuse_only_right_bytes(histories):
    run_state_machine_as_test(
        CacheMachine,
        settings=settings(
            max_examples=histories,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            derandomize=True,
        ),
    )
