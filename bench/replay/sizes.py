"""How large the simulated daemon's pools are, and the same in units of the trace's symbols."""

from __future__ import annotations

from dataclasses import dataclass

from bench.replay.cost_model import CostModel
from bench.replay.history import OfferRules
from cache import CacheOptions
from engine.errors import UnusableOptionError
from engine.frontiers import FrontierRules

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Sizes:
    """As the flags of `dalsegno serve` give them; the page size is in tokens."""

    max_concurrency: int = 8
    device_state_slots: int = 16
    host_state_slots: int | None = 24
    host_cache_mib: int = 32_768
    kv_pages: int = 13_312
    page_tokens: int = 64


@dataclass(frozen=True, slots=True)
class Scale:
    """Tokens to symbols. A page is at least one symbol; pools keep their bytes."""

    tokens_per_symbol: int
    page_symbols: int
    chunk_symbols: int

    @property
    def page_tokens(self) -> int:
        return self.page_symbols * self.tokens_per_symbol

    def symbols(self, tokens: int) -> int:
        """Those that hold so many tokens."""
        return -(-tokens // self.tokens_per_symbol)


def scale_of(tokens_per_symbol: int, page_tokens: int, model: CostModel) -> Scale:
    """Raises UnusableOptionError for a page that cannot be made of this trace's symbols."""
    if page_tokens % tokens_per_symbol and tokens_per_symbol % page_tokens:
        raise UnusableOptionError(
            f"--page-size {page_tokens} does not go with this trace, in which {tokens_per_symbol} tokens are one "
            "symbol; choose a divisor or a multiple"
        )
    return Scale(
        tokens_per_symbol=tokens_per_symbol,
        page_symbols=max(page_tokens // tokens_per_symbol, 1),
        chunk_symbols=max(model.prefill_chunk_tokens // tokens_per_symbol, 1),
    )


def cache_options(sizes: Sizes, scale: Scale, model: CostModel) -> CacheOptions:
    """The options of the real cache, with pages of whole symbols and the bytes that the flags ask for."""
    page_bytes = scale.page_tokens * model.kv_bytes_per_token
    return CacheOptions(
        page_size=scale.page_symbols,
        kv_pages=max(sizes.kv_pages * sizes.page_tokens // scale.page_tokens, 1),
        state_slots=sizes.max_concurrency + sizes.device_state_slots,
        has_state=model.state_bytes > 0,
        host_units=(sizes.host_cache_mib * _MIB) // page_bytes,
        host_units_per_state=max(-(-model.state_bytes // page_bytes), 1),
        host_state_cap=sizes.host_state_slots,
        page_bytes=page_bytes,
        state_bytes=model.state_bytes,
    )


def offer_rules(scale: Scale, model: CostModel, places: FrontierRules) -> OfferRules:
    """Which frontiers are offered. A block weighs what a state weighs in one layer of each kind, which are three to
    one: vLLM's rule for the size of a page in hybrid models."""
    tokens = scale.tokens_per_symbol
    block_tokens = model.state_bytes / model.kv_bytes_per_token / 3
    return OfferRules(places, block=max(-(-int(block_tokens) // tokens), 1))
