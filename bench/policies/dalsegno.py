"""Our own: the real context cache, with KV unlimited and so many slots, fed like every other policy."""

from __future__ import annotations

from bench.replay.history import Ask
from bench.replay.requests import SimRequest
from bench.replay.sizes import Scale
from cache import CacheOptions, CaptureTicket, ContextCache, Frontier


class Dalsegno:
    """Serves one request at a time, each in no time at its arrival. Mutable: owns a cache."""

    name = "dalsegno"

    def __init__(self, device_slots: int, scale: Scale, distinct_symbols: int, longest_symbols: int) -> None:
        """`distinct_symbols`: as many as the whole trace has, so that KV never runs out."""
        pages = -(-(distinct_symbols + longest_symbols) // scale.page_symbols) + 4 * device_slots
        self._tokens_per_symbol = scale.tokens_per_symbol
        self.cache = ContextCache(
            CacheOptions(
                page_size=scale.page_symbols,
                kv_pages=pages,
                # One for the request that runs; the others are for checkpoints, as in every policy.
                state_slots=1 + device_slots,
                has_state=True,
            )
        )

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
        cache.confirm_restore(lease)
        for frontier in tuple(lease.wanted):
            ticket = cache.capture(lease, frontier)
            if isinstance(ticket, CaptureTicket):
                cache.publish(ticket, now)
        if request.answer:
            cache.finish(lease, sequence, len(sequence) - 1, now)
        else:
            cache.abort(lease, request.prompt, 0, now)
        return match.cached_tokens * self._tokens_per_symbol
