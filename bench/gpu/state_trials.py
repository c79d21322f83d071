"""Trials of the kernels that keep something: pages of keys and values, tails of convolutions, recurrent states."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from bench.gpu.batches import Batch
from bench.gpu.trials import POISON, Trial, Values, generator_for, on, randn
from engine.kernels import UNSCALED, Kernels, KvScales
from engine.models.config import GatedDeltaNetConfig, ModelConfig

FP8_SCALES = KvScales(k=0.05, v=0.025)
_E4M3_MAX = 448.0
_DELTA_TOLERANCE = 3e-2
"""In a chunk several products follow on one another, and each may be rounded to bfloat16 on its way to the next."""
_FP8_TOLERANCE = 5e-2
"""Rounded to e4m3 a number moves by up to a sixteenth of itself, and a last bit of bfloat16 can decide which way."""


def page_trials(config: ModelConfig, batches: list[Batch], seed: int) -> Iterator[Trial]:
    """Appending and attending, with pages in the backend's dtype and in fp8."""
    for batch in batches:
        for is_fp8 in (False, True):
            yield _append(config, batch, seed, is_fp8=is_fp8)
            yield _attention(config, batch, seed, is_fp8=is_fp8)


def slot_trials(config: ModelConfig, batches: list[Batch], seed: int) -> Iterator[Trial]:
    """The convolution and the gated delta rule, with captures."""
    gdn = config.gated_delta_net
    assert gdn is not None, "a hybrid"
    for batch in batches:
        yield _conv(gdn, batch, seed)
        yield _gated_delta_rule(gdn, batch, seed)


def _case(config: ModelConfig, batch: Batch, is_fp8: bool) -> str:
    return f"{batch.name}, dim {config.attention.head_dim}, {'fp8 pages' if is_fp8 else 'plain pages'}"


def _append(config: ModelConfig, batch: Batch, seed: int, *, is_fp8: bool) -> Trial:
    """What was there before stays to the bit, in the batch's own pages too."""
    heads = config.attention
    case = _case(config, batch, is_fp8)
    generator = generator_for(seed, "append_paged_kv", case)
    shape = (batch.num_pages, 2, batch.layout.page_size, heads.num_kv_heads, heads.head_dim)
    before = _pages(shape, is_fp8, generator)
    new = randn(2, batch.layout.num_tokens, heads.num_kv_heads, heads.head_dim, generator=generator)
    new[:, 0, 0, 0] = 60.0
    is_new = _new_places(batch)
    scales = FP8_SCALES if is_fp8 else UNSCALED

    def run(kernels: Kernels) -> Values:
        pages = _to_device(kernels, before, is_fp8)
        kernels.plan(batch.layout)
        k, v = on(kernels, new)
        kernels.append_paged_kv(k, v, pages, scales)
        after = pages.float().cpu().transpose(1, 2)
        return {"written": after[is_new], "untouched": after[~is_new]}

    exact = frozenset({"untouched"} if is_fp8 else {"untouched", "written"})
    return Trial("append_paged_kv", case, run, _FP8_TOLERANCE if is_fp8 else 0.0, exact)


def _attention(config: ModelConfig, batch: Batch, seed: int, *, is_fp8: bool) -> Trial:
    """Pages of others, and what lies behind a sequence's last token, are poisoned."""
    heads = config.attention
    case = _case(config, batch, is_fp8)
    generator = generator_for(seed, "paged_attention", case)
    shape = (batch.num_pages, 2, batch.layout.page_size, heads.num_kv_heads, heads.head_dim)
    scales = FP8_SCALES if is_fp8 else UNSCALED
    pages = torch.full(shape, _E4M3_MAX if is_fp8 else POISON)
    used = _used_places(batch)
    values = randn(int(used.sum()), 2, *shape[3:], generator=generator)
    if is_fp8:
        values[:, 0] /= scales.k
        values[:, 1] /= scales.v
    pages.transpose(1, 2)[used] = values
    pages = pages.to(torch.float8_e4m3fn) if is_fp8 else pages.bfloat16().float()
    q = randn(batch.layout.num_tokens, heads.num_q_heads, heads.head_dim, generator=generator, scale=2.0)

    def run(kernels: Kernels) -> Values:
        kernels.plan(batch.layout)
        own = _to_device(kernels, pages, is_fp8)
        return {"out": kernels.paged_attention(on(kernels, q), own, heads.head_dim**-0.5, scales)}

    return Trial("paged_attention", case, run)


def _conv(gdn: GatedDeltaNetConfig, batch: Batch, seed: int) -> Trial:
    channels, width = gdn.conv_dim, gdn.conv_kernel_size
    generator = generator_for(seed, "causal_conv", batch.name)
    x = randn(batch.layout.num_tokens, channels, generator=generator)
    weight = randn(channels, width, generator=generator, scale=0.5)
    states = randn(batch.num_slots, channels, width - 1, generator=generator)
    _poison_slots(states, batch)
    touched = _touched_slots(batch)

    def run(kernels: Kernels) -> Values:
        kernels.plan(batch.layout)
        own = on(kernels, states)
        out = kernels.causal_conv(on(kernels, x), on(kernels, weight), own)
        after = own.float().cpu()
        return {"out": out, "tails": after[touched], "untouched": after[~touched]}

    return Trial("causal_conv", batch.name, run, exact=frozenset({"tails", "untouched"}))


def _gated_delta_rule(gdn: GatedDeltaNetConfig, batch: Batch, seed: int) -> Trial:
    """Decays from nearly none to nearly all, as trained heads have them."""
    n, k_heads, v_heads = batch.layout.num_tokens, gdn.num_k_heads, gdn.num_v_heads
    generator = generator_for(seed, "gated_delta_rule", batch.name)
    q, k = (randn(n, k_heads, gdn.key_head_dim, generator=generator) for _ in range(2))
    v = randn(n, v_heads, gdn.value_head_dim, generator=generator)
    a, b = (randn(n, v_heads, generator=generator) for _ in range(2))
    A_log = torch.empty(v_heads).uniform_(-5.0, 2.5, generator=generator)
    dt_bias = randn(v_heads, generator=generator)
    states = torch.randn(batch.num_slots, v_heads, gdn.value_head_dim, gdn.key_head_dim, generator=generator)
    _poison_slots(states, batch)
    touched = _touched_slots(batch)

    def run(kernels: Kernels) -> Values:
        kernels.plan(batch.layout)
        own = on(kernels, states, torch.float32)
        inputs = [on(kernels, x) for x in (q, k, v, a, b)]
        scalars = [on(kernels, x, torch.float32) for x in (A_log, dt_bias)]
        out = kernels.gated_delta_rule(*inputs, *scalars, own)  # type: ignore[call-arg]
        after = own.cpu()
        return {"out": out, "states": after[touched], "untouched": after[~touched]}

    return Trial("gated_delta_rule", batch.name, run, _DELTA_TOLERANCE, frozenset({"untouched"}))


def _pages(shape: tuple[int, ...], is_fp8: bool, generator: torch.Generator) -> torch.Tensor:
    pages = randn(*shape, generator=generator)
    return pages.to(torch.float8_e4m3fn) if is_fp8 else pages


def _to_device(kernels: Kernels, pages: torch.Tensor, is_fp8: bool) -> torch.Tensor:
    return on(kernels, pages, torch.float8_e4m3fn if is_fp8 else None)


def _new_places(batch: Batch) -> torch.Tensor:
    """[pages, page_size] bool: where the step's own tokens go."""
    places = torch.zeros(batch.num_pages, batch.layout.page_size, dtype=torch.bool)
    for i, (new, old) in enumerate(zip(batch.new_tokens, batch.context_tokens, strict=True)):
        positions = torch.arange(old, old + new)
        places[batch.pages_of(i)[positions // batch.layout.page_size], positions % batch.layout.page_size] = True
    return places


def _used_places(batch: Batch) -> torch.Tensor:
    """[pages, page_size] bool: where the batch's tokens are, the step's own included."""
    places = torch.zeros(batch.num_pages, batch.layout.page_size, dtype=torch.bool)
    for i, (new, old) in enumerate(zip(batch.new_tokens, batch.context_tokens, strict=True)):
        positions = torch.arange(old + new)
        places[batch.pages_of(i)[positions // batch.layout.page_size], positions % batch.layout.page_size] = True
    return places


def _poison_slots(states: torch.Tensor, batch: Batch) -> None:
    """NaN wherever no state may be read: slots of others, of captures, and of sequences that start from nothing."""
    layout = batch.layout
    is_read = torch.zeros(batch.num_slots, dtype=torch.bool)
    is_read[layout.state_slots[layout.has_initial_state].long()] = True
    states[~is_read] = float("nan")


def _touched_slots(batch: Batch) -> torch.Tensor:
    """[slots] bool: the batch's own, and where its captures go."""
    touched = torch.zeros(batch.num_slots, dtype=torch.bool)
    touched[batch.layout.state_slots.long()] = True
    touched[[capture.destination_slot for capture in batch.layout.captures]] = True
    return touched
