"""Our own: the real context cache, with KV unlimited and so many slots, fed like every other policy."""

from __future__ import annotations

from collections import Counter

from bench.replay.copies import BackgroundCopies
from bench.replay.cost_model import CostModel
from bench.replay.history import Ask
from bench.replay.requests import SimRequest
from bench.replay.sizes import Scale
from cache import CacheOptions, CaptureTicket, ContextCache, Frontier


class Dalsegno:
    """Serves one request at a time, each in no time at its arrival; copies to host memory end before the next.

    Mutable: owns a cache.
    """

    name = "dalsegno"

    def __init__(self, device_slots: int, host_slots: int, scale: Scale, model: CostModel, symbols: int) -> None:
        """`symbols` is what the whole trace needs if nothing is ever evicted, so that KV never runs out."""
        pages = -(-symbols // scale.page_symbols) + 4 * (device_slots + host_slots)
        page_bytes = scale.page_tokens * model.kv_bytes_per_token
        units_per_state = -(-model.state_bytes // page_bytes)
        self._tokens_per_symbol = scale.tokens_per_symbol
        self.cache = ContextCache(
            CacheOptions(
                page_size=scale.page_symbols,
                kv_pages=pages,
                # One for the request that runs; the others are for checkpoints, as in every policy.
                state_slots=1 + device_slots,
                has_state=True,
                host_units=pages + units_per_state * host_slots if host_slots else 0,
                host_units_per_state=units_per_state,
                host_state_cap=host_slots,
                page_bytes=page_bytes,
                state_bytes=model.state_bytes,
            )
        )
        self._copies = BackgroundCopies(self.cache, model, Counter())

    def serve(self, ask: Ask, request: SimRequest) -> int:
        cache, now = self.cache, request.arrival_seconds
        sequence = request.prompt + request.answer
        match = cache.match(str(request.number), request.namespace, request.prompt)
        wanted = [
            Frontier(offer.place.tokens // self._tokens_per_symbol, offer.kind)
            for offer in ask.offers
            if offer.place.tokens // self._tokens_per_symbol <= len(request.prompt)
        ]
        lease = cache.admit(match, len(sequence), wanted, now)
        if lease is None:
            raise AssertionError("there is room for one request, and no other runs")
        if lease.is_restoring:
            self._copies.begin_restore(lease, now)
            cache.confirm_restore(lease, now)
        cache.confirm_resume(lease)
        for frontier in tuple(lease.wanted):
            ticket = cache.capture(lease, frontier)
            if isinstance(ticket, CaptureTicket):
                cache.publish(ticket, now)
                self._demote(now)
        if request.answer:
            cache.finish(lease, sequence, len(sequence) - 1, now)
        else:
            cache.abort(lease, request.prompt, 0, now)
        self._demote(now)
        self._free_the_running_slot(request.namespace, now)
        return match.cached_tokens * self._tokens_per_symbol

    def _free_the_running_slot(self, namespace: str, now: float) -> None:
        """An answer leaves its checkpoint in the slot in which it ran. The others have no such slot to hold a state in
        until the next request comes, so another is made to want it, and leaves at once."""
        if self.cache.slots.free:
            return
        lease = self.cache.admit(self.cache.miss("nobody", namespace, (0,)), 1, (), now)
        if lease is not None:
            self.cache.abort(lease, (), 0, now)

    def _demote(self, now: float) -> None:
        self._copies.demote(now)
        self._copies.drain(now)
