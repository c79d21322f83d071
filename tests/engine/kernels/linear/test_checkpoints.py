"""Whole models of published layouts, quantised, through the flashinfer backend on a planned SM120."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.kernels.flashinfer.backend import FlashinferKernels
from engine.kernels.torch import TorchKernels
from engine.models.registry import load_model, read_config
from tests.engine.kernels.linear.library import LinearLibrary
from tests.engine.kernels.linear.samples import SM120, relative_error
from tests.engine.models.driver import Driver
from tests.engine.weights.published import write_published

PROMPT = [token * 7 % 64 for token in range(37)]


def logits_of(folder: Path, kernels) -> torch.Tensor:
    driver = Driver(load_model(folder, kernels), kernels)
    sequence = driver.open()
    return torch.cat([driver.step([(sequence, PROMPT)]), driver.step([(sequence, [5])])])


def kinds_of(kernels) -> set[str]:
    return {choice.implementation for choice in kernels.choices if choice.kernel.startswith("linear")}


@pytest.mark.parametrize(
    ("layout", "kinds"),
    [
        ("modelopt mixed w4a4", {"nvfp4 w4a16 (flashinfer mm_bf16_fp4)", "fp8 dequantised to bf16", "dense"}),
        ("modelopt nvfp4 with kv scales", {"nvfp4 w4a16 (flashinfer mm_bf16_fp4)", "dense"}),
        ("llm-compressor", {"nvfp4 w4a16 (flashinfer mm_bf16_fp4)", "dense"}),
    ],
)
def test_quantised_weights_answer_as_torch_does(tmp_path, layout, kinds):
    """Four layers in bfloat16: torch's own answer in it lies up to 0.06 from that in float32; a wrong scale, 1."""
    write_published(layout, tmp_path)
    expected = logits_of(tmp_path, TorchKernels())
    config = read_config(tmp_path)
    kernels = FlashinferKernels(torch.device("cpu"), torch.bfloat16, config, LinearLibrary(), SM120, "bf16")
    assert relative_error(logits_of(tmp_path, kernels), expected.double()) < 0.08
    assert kinds_of(kernels) == kinds


def test_quantised_activations_run_where_the_checkpoint_has_their_scales(tmp_path):
    write_published("modelopt mixed w4a4", tmp_path)
    config = read_config(tmp_path)
    kernels = FlashinferKernels(torch.device("cpu"), torch.bfloat16, config, LinearLibrary(), SM120)
    assert logits_of(tmp_path, kernels).isfinite().all()
    assert kinds_of(kernels) == {"nvfp4 w4a4 (flashinfer mm_fp4)", "fp8 w8a8 (flashinfer bmm_fp8)", "dense"}
