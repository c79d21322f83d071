"""Both backends side by side: flashinfer's over the reference library, and torch's in float32 that it is held to."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch

from engine.kernels import BatchLayout, Kernels, StateCapture
from engine.kernels.device import DeviceTraits
from engine.kernels.flashinfer import attention
from engine.kernels.flashinfer.backend import FlashinferKernels
from engine.kernels.torch import TorchKernels
from engine.models.config import AttentionConfig, GatedDeltaNetConfig, LayerKind, ModelConfig, RopeConfig
from tests.engine.kernels.flashinfer.reference_library import ReferenceLibrary
from tests.engine.kernels.layouts import make_layout

CPU = torch.device("cpu")
PAGES, SLOTS, PAGE_SIZE = 40, 12, 16
NAN = float("nan")
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 1e-4}
"""Of the largest magnitude. In bfloat16 both backends start from the same rounded inputs, and one rounds on the way."""

HOPPER = DeviceTraits("an H100", (9, 0), total_bytes=80 << 30, multiprocessors=132)
ARCHITECTURES = {
    "sm89": DeviceTraits("an L40S", (8, 9), total_bytes=48 << 30, multiprocessors=142),
    "sm90": HOPPER,
    "sm100": DeviceTraits("a B200", (10, 0), total_bytes=180 << 30, multiprocessors=148),
    "sm120": DeviceTraits("an RTX PRO 6000", (12, 0), total_bytes=96 << 30, multiprocessors=188),
}

CONFIG = ModelConfig(
    architecture="qwen3_5",
    vocab_size=64,
    hidden_size=256,
    intermediate_size=128,
    layer_kinds=(LayerKind.LINEAR_ATTENTION, LayerKind.FULL_ATTENTION),
    attention=AttentionConfig(num_q_heads=4, num_kv_heads=2, head_dim=128, has_output_gate=True, has_qk_norm=True),
    gated_delta_net=GatedDeltaNetConfig(
        num_k_heads=1, num_v_heads=2, key_head_dim=128, value_head_dim=128, conv_kernel_size=4
    ),
    rope=RopeConfig(theta=1e4, rotary_dim=32),
    rms_norm_eps=1e-6,
    max_position_embeddings=256,
    has_tied_embeddings=False,
)
"""The shapes of Qwen3.5, with fewer heads."""


@dataclass(frozen=True)
class Rig:
    """One backend under test. `library` is what it calls, possibly through something that alters the calls."""

    kernels: Kernels
    exact: TorchKernels
    library: ReferenceLibrary
    traits: DeviceTraits = HOPPER
    alter: Any = None
    random: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(7))

    @property
    def dtype(self) -> torch.dtype:
        return self.kernels.dtype

    def draw(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        """Random numbers that the backend's dtype can hold, in that dtype."""
        return (torch.randn(*shape, generator=self.random) * scale).to(self.dtype)

    def with_attention(self, q_heads: int, kv_heads: int, head_dim: int) -> Rig:
        """The same backend for a model with other heads."""
        heads = replace(CONFIG.attention, num_q_heads=q_heads, num_kv_heads=kv_heads, head_dim=head_dim)
        return make_rig(self.dtype, self.traits, config=replace(CONFIG, attention=heads), alter=self.alter)

    def on(self, architecture: str) -> Rig:
        """The same backend on another GPU."""
        return make_rig(self.dtype, ARCHITECTURES[architecture], alter=self.alter)

    def plan(self, layout: BatchLayout) -> None:
        self.kernels.plan(layout)
        self.exact.plan(layout)

    def assert_close(self, got: torch.Tensor, expected: torch.Tensor, what: str) -> None:
        """Within the tolerance of the largest magnitude that is expected; where NaN is expected, NaN."""
        assert got.shape == expected.shape, f"{what}: shape {tuple(got.shape)}, expected {tuple(expected.shape)}"
        got, expected = got.detach().float(), expected.detach().float()
        assert torch.equal(got.isnan(), expected.isnan()), f"{what}: NaN in other places than expected"
        got, expected = got.nan_to_num(0.0), expected.nan_to_num(0.0)
        error = float((got - expected).abs().max() / expected.abs().max().clamp_min(1e-30))
        assert error <= TOLERANCE[self.dtype], f"{what}: {error:.2g} of the largest magnitude"


def make_rig(
    dtype: torch.dtype = torch.bfloat16,
    traits: DeviceTraits = HOPPER,
    *,
    config: ModelConfig = CONFIG,
    alter: Any = None,
) -> Rig:
    """`alter(library)` stands between the backend and the library."""
    library = ReferenceLibrary(dtype)
    called = library if alter is None else alter(library)
    # No reference uses the workspace, and filling 128 MiB with zeros takes longer than most checks.
    with mock.patch.object(attention, "ATTENTION_WORKSPACE_BYTES", 1 << 10):
        kernels = FlashinferKernels(CPU, dtype, config, called, traits)
    return Rig(kernels, TorchKernels(torch.float32), library, traits, alter)


@dataclass(frozen=True)
class Case:
    """A step; pages and slots are handed out in no order."""

    new_tokens: Sequence[int]
    context_tokens: Sequence[int]
    captures: tuple[StateCapture, ...] = ()
    page_size: int = PAGE_SIZE
    slots: Sequence[int] = (5, 1, 7, 2, 10)

    def layout(self) -> BatchLayout:
        totals = [new + old for new, old in zip(self.new_tokens, self.context_tokens, strict=True)]
        numbers = torch.randperm(PAGES, generator=torch.Generator().manual_seed(3)).tolist()
        pages = [[numbers.pop() for _ in range(-(-total // self.page_size))] for total in totals]
        return make_layout(
            self.new_tokens,
            self.context_tokens,
            pages=pages,
            page_size=self.page_size,
            slots=self.slots[: len(totals)],
            captures=self.captures,
        )


CASES = {
    "decodes at and over page boundaries": Case([1, 1, 1], [15, 16, 40]),
    "one decode": Case([1], [31]),
    "prefills": Case([40, 7], [0, 0]),
    "a prefill behind a context": Case([20], [33]),
    "prefills that end and begin with pages": Case([16, 32, 17], [16, 0, 15]),
    "decodes and prefills": Case([1, 1, 30, 17, 1], [40, 3, 0, 50, 0]),
    "pages of 64": Case([1, 70, 64], [64, 10, 0], page_size=64),
}

STATE_CASES = {
    "decodes": Case([1, 1, 1], [9, 9, 9], (StateCapture(0, 1, 3), StateCapture(2, 1, 4))),
    "a fresh chunk": Case([64], [0], (StateCapture(0, 64, 3),)),
    "fresh, less than a chunk": Case([3], [0]),
    "resumed, captured on the grid and at the end": Case([70], [5], (StateCapture(0, 64, 3), StateCapture(0, 70, 4))),
    "one grid point of two": Case([130], [0], (StateCapture(0, 128, 8),)),
    "decodes, resumed and fresh": Case(
        [1, 1, 130, 64, 1],
        [10, 4, 0, 7, 0],
        (
            StateCapture(2, 128, 6),
            StateCapture(2, 64, 3),
            StateCapture(2, 130, 4),
            StateCapture(3, 64, 8),
            StateCapture(1, 1, 9),
        ),
    ),
}


def draw_case(rng: random.Random) -> Case:
    """Up to four sequences, decodes first; slots and captures in no order."""
    decodes = rng.randint(0, 3)
    prefills = rng.randint(0 if decodes else 1, 4 - decodes)
    new = [1] * decodes + [rng.choice((1, 2, 17, 63, 64, 65, 128, 130)) for _ in range(prefills)]
    old = [rng.choice((1, 15, 16, 17, 64)) for _ in range(decodes)]
    old += [0 if count == 1 else rng.choice((0, 0, 1, 16, 63)) for count in new[decodes:]]
    slots = rng.sample(range(SLOTS), SLOTS)
    free, captures = slots[len(new) :], []
    for i, count in enumerate(new):
        for offset in {*range(64, count, 64), count}:
            if free and rng.random() < 0.5:
                captures.append(StateCapture(i, offset, free.pop()))
    rng.shuffle(captures)
    return Case(new, old, tuple(captures), slots=slots[: len(new)])


def kv_pages(rig: Rig, layout: BatchLayout, *, kv_heads: int = 2, head_dim: int = 128) -> torch.Tensor:
    """[pages, 2, page_size, kv_heads, head_dim]: the sequences' contexts, NaN where nothing of theirs lies yet."""
    cache = torch.full((PAGES, 2, layout.page_size, kv_heads, head_dim), NAN, dtype=rig.dtype)
    indptr, new = layout.kv_indptr.tolist(), layout.qo_indptr.diff().tolist()
    for i, last in enumerate(layout.kv_last_page_len.tolist()):
        own = layout.kv_indices[indptr[i] : indptr[i + 1]].tolist()
        for position in range((len(own) - 1) * layout.page_size + last - new[i]):
            page, offset = own[position // layout.page_size], position % layout.page_size
            cache[page, :, offset] = rig.draw(2, kv_heads, head_dim)
    return cache


def slot_pool(rig: Rig, layout: BatchLayout, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    """[slots, *shape]: states of the sequences that have one, NaN elsewhere."""
    pool = torch.full((SLOTS, *shape), NAN, dtype=dtype)
    for slot, has_state in zip(layout.state_slots.tolist(), layout.has_initial_state.tolist(), strict=True):
        if has_state:
            pool[slot] = rig.draw(*shape).to(dtype)
    return pool
