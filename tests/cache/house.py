"""A cache on a device and host memory that notice wrong bytes, and requests that walk through it as in the engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cache import CacheOptions, CaptureTicket, ContextCache, Demotion, Frontier, Match, RequestLease, Tier, check
from cache.checkpoints import Checkpoint
from cache.types import CheckpointKind
from tests.cache.device_model import Device

SHARED, BRANCH = CheckpointKind.SHARED_STABLE_PREFIX, CheckpointKind.SHARED_BRANCH
CLOSURE, ENDPOINT = CheckpointKind.PRIVATE_TURN_CLOSURE, CheckpointKind.PRIVATE_ENDPOINT
ANCHOR = CheckpointKind.PRIVATE_LONG_ANCHOR
EVERYTHING = 10**9
ALL_READY = 99
"""For `demote_ahead`: every checkpoint is to have a copy in host memory."""


def prefix_of(checkpoint: Checkpoint) -> tuple[int, ...]:
    return tuple(token for node in checkpoint.node.path() for token in node.key) + checkpoint.tail


class House:
    """Pages of 4 tokens; a state image takes 2 units of host memory. `demote_ahead` is such that all are demoted."""

    def __init__(self, kv_pages=64, state_slots=8, host_units=0, has_state=True, **options):
        options = {"host_units_per_state": 2, "demote_ahead": ALL_READY, "page_bytes": 10, "state_bytes": 25, **options}
        slots = state_slots if has_state else 0
        self.cache = ContextCache(CacheOptions(4, kv_pages, slots, has_state, host_units=host_units, **options))
        self.device = Device(self.cache)
        self.now = 0.0
        self._requests = 0

    def tick(self) -> float:
        self.now += 1.0
        return self.now

    def let_all_be_equally_old(self) -> None:
        """After a while all that was used until now is idle for the same octave of seconds, so that only what each
        saves makes a difference."""
        assert self.now < 64
        self.now += 64

    def match(self, tokens: Iterable[int], namespace="n") -> Match:
        self._requests += 1
        return self.cache.match(f"r{self._requests}", namespace, tuple(tokens))

    def admit(self, tokens: Iterable[int], wanted: Sequence[Frontier] = (), namespace="n") -> RequestLease:
        """A request that got in, with nothing copied or computed yet."""
        tokens = tuple(tokens)
        lease = self.cache.admit(self.match(tokens, namespace), len(tokens) + 1, wanted, self.tick())
        assert lease is not None
        return lease

    def restore(self, lease: RequestLease) -> None:
        """Run what it needs from host memory, if anything."""
        if lease.is_restoring:
            self.device.run(lease.restore)
            self.cache.confirm_restore(lease, self.tick())

    def compute(self, lease: RequestLease) -> None:
        """All of its prompt, with a capture at every frontier that it wants."""
        self.restore(lease)
        self.device.resume(lease)
        done = lease.cached_tokens
        for frontier in sorted(lease.wanted, key=lambda f: f.tokens):
            self.device.compute(lease, lease.tokens, done, frontier.tokens)
            done = frontier.tokens
            ticket = self.cache.capture(lease, frontier)
            if isinstance(ticket, CaptureTicket):
                self.device.capture(ticket)
                self.cache.publish(ticket, self.tick())
        self.device.compute(lease, lease.tokens, done, len(lease.tokens))

    def serve(self, tokens: Iterable[int], *frontiers: Frontier | int, namespace="n", endpoint=False) -> RequestLease:
        """One request from arrival to end; a plain number is the end of a turn. Only with `endpoint` is its own end
        kept."""
        wanted = [f if isinstance(f, Frontier) else Frontier(f, CLOSURE) for f in frontiers]
        lease = self.admit(tokens, wanted, namespace)
        self.compute(lease)
        close = self.cache.finish if endpoint else self.cache.abort
        close(lease, lease.tokens, len(lease.tokens) if endpoint else 0, self.tick())
        self.assert_sound()
        return lease

    def demote(self, most_bytes=EVERYTHING) -> list[Demotion]:
        """Copy to host memory what should be there now, and confirm it."""
        demotions = self.cache.plan_demotions(self.tick(), most_bytes)
        for demotion in demotions:
            self.device.run(demotion.copies)
            self.cache.confirm_demotion(demotion, self.tick())
        self.assert_sound()
        return demotions

    def keep_in_host(self, tokens: Iterable[int], *frontiers: Frontier | int, namespace="n") -> None:
        """Serve it, and leave what it was to keep in host memory alone."""
        self.serve(tokens, *frontiers, namespace=namespace)
        self.demote()
        self.cache.reset([Tier.DEVICE])
        self.assert_sound()

    def reused(self, tokens: Iterable[int], namespace="n") -> int:
        """How many tokens a request would reuse now; it leaves at once."""
        match = self.match(tokens, namespace)
        self.cache.release(match)
        return match.cached_tokens

    def report(self, tokens: Iterable[int], *frontiers: int, namespace="n"):
        """What a request would reuse now and why not the rest; it leaves at once."""
        match = self.match(tokens, namespace)
        report = self.cache.report(match, [Frontier(f, CLOSURE) for f in frontiers])
        self.cache.release(match)
        return report

    def checkpoint(self, tokens: Iterable[int], namespace="n") -> Checkpoint:
        found = self.cache.retention.find(namespace, tuple(tokens))
        assert found is not None
        return found

    def assert_sound(self) -> None:
        assert check(self.cache) == []
        self.device.poison_free_units()

    def assert_nothing_held(self) -> None:
        """No request and no copy holds anything."""
        self.assert_sound()
        for pool in (self.cache.pages, self.cache.slots, self.cache.host):
            counts = pool.counts()
            assert (counts.pinned, counts.in_flight) == (0, 0)
