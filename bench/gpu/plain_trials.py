"""Trials of the kernels that keep nothing: norms, activation, embedding, rope."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from bench.gpu.batches import Batch
from bench.gpu.trials import Trial, Values, generator_for, on, randn
from engine.kernels import Kernels
from engine.models.config import ModelConfig
from engine.models.rope import cos_sin_cache

_ROWS = (1, 7, 300)
_ROPE_POSITIONS = 8192


def plain_trials(config: ModelConfig, seed: int) -> Iterator[Trial]:
    """In shapes of `config`."""
    for rows in _ROWS:
        yield _rms_norm(config, rows, seed)
        yield _head_norm(config, rows, seed)
        yield _fused_add_rms_norm(config, rows, seed)
        if config.gated_delta_net is not None:
            yield _gated_rms_norm(config, rows, seed)
        yield _silu_and_mul(config, rows, seed)
    yield _embedding(config, seed)


def _rms_norm(config: ModelConfig, rows: int, seed: int) -> Trial:
    case = f"{rows} x {config.hidden_size}"
    generator = generator_for(seed, "rms_norm", case)
    x = randn(rows, config.hidden_size, generator=generator, scale=3.0)
    weight = randn(config.hidden_size, generator=generator) + 1.0

    def run(kernels: Kernels) -> Values:
        return {"out": kernels.rms_norm(on(kernels, x), on(kernels, weight), config.rms_norm_eps)}

    return Trial("rms_norm", case, run)


def _head_norm(config: ModelConfig, rows: int, seed: int) -> Trial:
    """Queries that lie between their gates, as the projection leaves them."""
    heads, dim = config.attention.num_q_heads, config.attention.head_dim
    case = f"{rows} x {heads} heads of {dim}, every other one"
    generator = generator_for(seed, "head_norm", case)
    x = randn(rows, 2 * heads, dim, generator=generator)
    weight = randn(dim, generator=generator) + 1.0

    def run(kernels: Kernels) -> Values:
        return {"out": kernels.rms_norm(on(kernels, x)[:, 0::2], on(kernels, weight), config.rms_norm_eps)}

    return Trial("rms_norm", case, run)


def _fused_add_rms_norm(config: ModelConfig, rows: int, seed: int) -> Trial:
    case = f"{rows} x {config.hidden_size}"
    generator = generator_for(seed, "fused_add_rms_norm", case)
    x, residual = (randn(rows, config.hidden_size, generator=generator) for _ in range(2))
    weight = randn(config.hidden_size, generator=generator) + 1.0

    def run(kernels: Kernels) -> Values:
        kept = on(kernels, residual)
        out = kernels.fused_add_rms_norm(on(kernels, x), kept, on(kernels, weight), config.rms_norm_eps)
        return {"out": out, "residual": kept}

    return Trial("fused_add_rms_norm", case, run)


def _gated_rms_norm(config: ModelConfig, rows: int, seed: int) -> Trial:
    gdn = config.gated_delta_net
    assert gdn is not None
    heads, dim = gdn.num_v_heads, gdn.value_head_dim
    case = f"{rows} x {heads} heads of {dim}"
    generator = generator_for(seed, "gated_rms_norm", case)
    x, gate = (randn(rows, heads, dim, generator=generator) for _ in range(2))
    weight = randn(dim, generator=generator) + 1.0

    def run(kernels: Kernels) -> Values:
        # The gate is a slice of the projection's rows.
        rows_of_both = torch.cat((on(kernels, x).flatten(1), on(kernels, gate).flatten(1)), dim=1)
        sliced = rows_of_both[:, heads * dim :].view(rows, heads, dim)
        return {"out": kernels.gated_rms_norm(on(kernels, x), sliced, on(kernels, weight), config.rms_norm_eps)}

    return Trial("gated_rms_norm", case, run)


def _silu_and_mul(config: ModelConfig, rows: int, seed: int) -> Trial:
    case = f"{rows} x 2 x {config.intermediate_size}"
    x = randn(rows, 2 * config.intermediate_size, generator=generator_for(seed, "silu_and_mul", case))
    return Trial("silu_and_mul", case, lambda kernels: {"out": kernels.silu_and_mul(on(kernels, x))})


def _embedding(config: ModelConfig, seed: int) -> Trial:
    vocab = min(config.vocab_size, 4096)
    generator = generator_for(seed, "embedding")
    table = randn(vocab, config.hidden_size, generator=generator)
    token_ids = torch.randint(vocab, (65,), generator=generator)

    def run(kernels: Kernels) -> Values:
        return {"out": kernels.embedding(token_ids.to(kernels.device), on(kernels, table))}

    return Trial("embedding", f"65 of {vocab} rows", run, exact=frozenset({"out"}))


def rope_trials(config: ModelConfig, batches: list[Batch], seed: int) -> Iterator[Trial]:
    """Queries and keys as slices of one projection, at the positions of each batch."""
    table = cos_sin_cache(config.rope, min(config.max_position_embeddings, _ROPE_POSITIONS))
    return (_rope(config, table, batch, seed) for batch in batches)


def _rope(config: ModelConfig, table: torch.Tensor, batch: Batch, seed: int) -> Trial:
    heads = config.attention
    n, q_heads, kv_heads, dim = batch.layout.num_tokens, heads.num_q_heads, heads.num_kv_heads, heads.head_dim
    rows = randn(n, q_heads + 2 * kv_heads, dim, generator=generator_for(seed, "apply_rope", batch.name, str(dim)))

    def run(kernels: Kernels) -> Values:
        kernels.plan(batch.layout)
        q, k, v = on(kernels, rows).split_with_sizes((q_heads, kv_heads, kv_heads), dim=1)
        kernels.apply_rope(q, k, on(kernels, table, torch.float32))
        return {"q": q, "k": k, "v": v, "not rotated": q[..., config.rope.rotary_dim :]}

    exact = frozenset({"v", "not rotated"})
    return Trial("apply_rope", f"{batch.name}, {config.rope.rotary_dim} of {dim}", run, exact=exact)
