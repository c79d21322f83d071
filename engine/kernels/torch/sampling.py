"""Picking tokens from logits; a row's result depends on that row alone."""

from __future__ import annotations

import torch

from engine.errors import NonFiniteLogitsError
from engine.kernels import SamplingBatch

_MASK32 = 0xFFFFFFFF
_HEAD_TOKENS = 256


def sample(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """logits [B, vocab] -> token ids [B] int64 on the host. Raises NonFiniteLogitsError.

    The order of the filters is that of flashinfer's `top_k_top_p_sampling_from_probs` (`top_k_first`) and of
    transformers: temperature, top-k, top-p on what top-k left, min-p against the largest probability.
    """
    best = logits.max(dim=-1)
    if not bool(best.values.isfinite().all()):
        rows = (~best.values.isfinite()).nonzero().flatten().tolist()
        raise NonFiniteLogitsError(rows)
    tokens: torch.Tensor = best.indices.to("cpu")
    temperatures: list[float] = batch.temperature.tolist()
    if not any(temperatures):
        return tokens
    top_k, top_p, min_p = batch.top_k.tolist(), batch.top_p.tolist(), batch.min_p.tolist()
    seeds, offsets = batch.seeds.tolist(), batch.offsets.tolist()
    for row, temperature in enumerate(temperatures):
        if temperature > 0:
            uniform = philox_uniform(seeds[row], offsets[row])
            tokens[row] = _sample_row(logits[row], temperature, top_k[row], top_p[row], min_p[row], uniform)
    return tokens


def _sample_row(
    logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float, uniform: float
) -> int:
    # Shifted first: a tiny temperature must not make the largest logit infinite.
    scaled = (logits.float() - logits.max()) / max(temperature, 1e-6)
    ids: torch.Tensor | None = None
    if 0 < top_k < len(scaled):
        scaled, ids = scaled.topk(top_k)
    probabilities = scaled.softmax(dim=-1)
    if top_p < 1.0:
        if ids is None:
            probabilities, ids = _head(probabilities, top_p)
        # Keep each token in front of which less than top_p lies; the first always stays.
        before = probabilities.cumsum(dim=-1) - probabilities
        probabilities = probabilities * (before < top_p)
    if min_p > 0.0:
        probabilities = probabilities * (probabilities >= min_p * probabilities.max())
    cumulative = probabilities.double().cumsum(dim=-1)
    place = int(torch.searchsorted(cumulative, uniform * cumulative[-1], right=True))
    if place == len(cumulative):
        # Rounding has put the target on the total itself: the last token that is left.
        place = int(probabilities.nonzero()[-1])
    return place if ids is None else int(ids[place])


def _head(probabilities: torch.Tensor, top_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest probabilities in falling order, as many as hold `top_p` together, and their ids."""
    if len(probabilities) > _HEAD_TOKENS:
        # Nearly always enough, and some fifty times quicker than sorting a vocabulary.
        values, ids = probabilities.topk(_HEAD_TOKENS)
        if float(values.sum()) >= top_p:
            return values, ids
    values, ids = probabilities.sort(descending=True, stable=True)
    return values, ids


def philox_uniform(seed: int, offset: int) -> float:
    """A number in [0, 1) from 53 bits of Philox4x32-10 with key `seed` and counter `offset` (Salmon et al., 2011)."""
    c0, c1, c2, c3 = offset & _MASK32, (offset >> 32) & _MASK32, 0, 0
    k0, k1 = seed & _MASK32, (seed >> 32) & _MASK32
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _MASK32, (p0 >> 32) ^ c3 ^ k1, p0 & _MASK32
        k0, k1 = (k0 + 0x9E3779B9) & _MASK32, (k1 + 0xBB67AE85) & _MASK32
    return ((c0 << 21) | (c1 >> 11)) * 2.0**-53
