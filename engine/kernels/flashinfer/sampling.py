"""Picking tokens on the device: flashinfer cuts the probabilities, a number per row drawn on the host picks.

flashinfer's own sampling takes a seed and an offset for each row, but the row's place in the batch enters its random
numbers too; here a row's token depends on that row alone. The random number is the torch backend's, and is laid over
the tokens that are left in the order of their ids.

Ties: equal probabilities are kept or cut as flashinfer's thresholds fall, which may keep more than k tokens where the
k-th largest is shared; nothing depends on the batch.
"""

from __future__ import annotations

import torch

from engine.errors import NonFiniteLogitsError
from engine.kernels import SamplingBatch
from engine.kernels.flashinfer.library import Library
from engine.kernels.torch.sampling import philox_uniform
from engine.uploads import upload

LEAST_TEMPERATURE = 1e-6


def sample(library: Library, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """logits [B, vocab] -> token ids [B] int64 on the host. Raises NonFiniteLogitsError. One wait for the device."""
    best = logits.max(dim=-1)
    picked = best.indices
    is_drawn = batch.temperature > 0
    if bool(is_drawn.any()):
        drawn = draw(library, logits, best.values, batch)
        picked = torch.where(upload(is_drawn, logits.device), drawn, picked)
    # Together, so that the host waits once.
    tokens, is_finite = torch.stack((picked, best.values.isfinite().long())).to("cpu").unbind()
    if not bool(is_finite.all()):
        raise NonFiniteLogitsError((is_finite == 0).nonzero().flatten().tolist())
    return tokens


def draw(library: Library, logits: torch.Tensor, largest: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """One id for each row, [B] on the device; what greedy rows get means nothing."""
    device = logits.device
    temperature = torch.where(batch.temperature > 0, batch.temperature.clamp(min=LEAST_TEMPERATURE), 1.0)
    # Shifted first: a tiny temperature must not make the largest logit infinite. Rows that will be refused get numbers
    # that every kernel can work with.
    largest = largest.float().unsqueeze(-1)
    shifted = torch.where(largest.isfinite(), logits.float() - largest, 0.0)
    probs = library.softmax(logits=shifted, temperature=upload(temperature, device))
    vocabulary = logits.shape[1]
    cuts_k = (batch.top_k > 0) & (batch.top_k < vocabulary)
    if bool(cuts_k.any()):
        top_k = torch.where(cuts_k, batch.top_k, vocabulary).to(torch.int32)
        cut = library.top_k_renorm_probs(probs=probs, top_k=upload(top_k, device), is_deterministic=True)
        probs = torch.where(upload(cuts_k, device).unsqueeze(-1), cut, probs)
    cuts_p = batch.top_p < 1
    if bool(cuts_p.any()):
        cut = library.top_p_renorm_probs(probs=probs, top_p=upload(batch.top_p, device), is_deterministic=True)
        probs = torch.where(upload(cuts_p, device).unsqueeze(-1), cut, probs)
    if bool((batch.min_p > 0).any()):
        least = upload(batch.min_p, device) * probs.amax(dim=-1)
        probs = probs.masked_fill(probs < least.unsqueeze(-1), 0.0)
    return invert(probs, upload(uniforms(batch), device))


def uniforms(batch: SamplingBatch) -> torch.Tensor:
    """A number in [0, 1) for each row, [B] float64 on the host: a function of its seed and offset."""
    pairs = zip(batch.seeds.tolist(), batch.offsets.tolist(), strict=True)
    return torch.tensor([philox_uniform(seed, offset) for seed, offset in pairs], dtype=torch.float64)


def invert(probs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """probs [B, vocab], not necessarily of sum 1, uniform [B] -> the id at which that share of the sum is passed."""
    cumulative = probs.double().cumsum(dim=-1)
    target = uniform.unsqueeze(-1) * cumulative[:, -1:]
    place = torch.searchsorted(cumulative, target, right=True).clamp_(max=probs.shape[1] - 1)
    # A GPU adds up in parallel, so that sums may fall by a rounding; and a target on the total is passed nowhere. A
    # token that was cut is never picked for that: the likeliest is.
    is_left = probs.gather(-1, place) > 0
    return torch.where(is_left, place, probs.argmax(dim=-1, keepdim=True)).squeeze(-1)
