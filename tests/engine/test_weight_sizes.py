"""What weights take on a device, told from headers: as much as they take once they are loaded there."""

from pathlib import Path

import pytest
import torch

from engine.kernels import Kernels
from engine.kernels.device import CPU, DeviceTraits
from engine.kernels.flashinfer.backend import FlashinferKernels
from engine.kernels.torch import TorchKernels
from engine.models.registry import load_model, read_config
from engine.weight_sizes import size_weights
from tests.engine.kernels.flashinfer.reference_library import ReferenceLibrary
from tests.engine.weights.published import LAYOUTS, write_published
from tests.engine.weights.tiny_checkpoints import TINY_CONFIG

BLACKWELL = DeviceTraits("an RTX PRO 6000", (12, 0))
ADA, AMPERE = DeviceTraits("an L40S", (8, 9)), DeviceTraits("an A100", (8, 0))
NEEDS_TRITON = {"modelopt mixed w4a16", "modelopt mixed, weights only", "modelopt nvfp4 with kv scales"}
"""Layouts with layers that on SM120 only Triton's kernel multiplies, which is not there on a CPU."""


def loaded_bytes(folder: Path, kernels: Kernels) -> int:
    return load_model(folder, kernels).weight_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["bf16 3.5", "modelopt mixed w4a16", "llm-compressor mixed"])
def test_on_the_cpu_everything_is_unpacked(tmp_path, layout, dtype):
    write_published(layout, tmp_path)
    sizes = size_weights(tmp_path, read_config(tmp_path), CPU, dtype.itemsize)
    assert sizes.nbytes == loaded_bytes(tmp_path, TorchKernels(dtype))


@pytest.mark.parametrize("layout", sorted(LAYOUTS.keys() - NEEDS_TRITON))
def test_on_a_gpu_each_layer_takes_what_the_class_that_serves_it_takes(tmp_path, layout):
    write_published(layout, tmp_path)
    config = read_config(tmp_path)
    kernels = FlashinferKernels(torch.device("cpu"), torch.bfloat16, config, ReferenceLibrary(), BLACKWELL)
    assert size_weights(tmp_path, config, BLACKWELL, 2).nbytes == loaded_bytes(tmp_path, kernels)


def test_a_tied_head_is_a_copy_of_its_own(tmp_path):
    tied = {"tie_word_embeddings": True}
    config = TINY_CONFIG | tied | {"text_config": TINY_CONFIG["text_config"] | tied}
    write_published("bf16 3.8", tmp_path, config=config)
    sizes = size_weights(tmp_path, read_config(tmp_path), CPU, 4)
    assert sizes.nbytes == loaded_bytes(tmp_path, TorchKernels())


@pytest.mark.parametrize(
    ("traits", "activations", "unpacked"),
    [(BLACKWELL, "auto", 0), (ADA, "auto", 0), (AMPERE, "auto", 17), (BLACKWELL, "bf16", 17), (CPU, "auto", 26)],
    ids=["sm120", "sm89", "sm80", "sm120-bf16", "cpu"],
)
def test_what_is_unpacked_depends_on_the_device_and_on_the_activations(tmp_path, traits, activations, unpacked):
    write_published("llm-compressor mixed", tmp_path)
    config = read_config(tmp_path)
    sizes = size_weights(tmp_path, config, traits, 2, activations)
    forms = {part.name.strip() for part in sizes.parts}
    assert ("unpacked" in forms) is bool(unpacked)
    assert ("fp8" in forms) is (unpacked == 0)
    assert ("NVFP4" in forms) is (unpacked < 26)


def test_loading_takes_its_largest_block_twice(tmp_path):
    write_published("bf16 3.8", tmp_path)
    sizes = size_weights(tmp_path, read_config(tmp_path), CPU, 4)
    # Attention's: 256 rows of queries and gates, 64 of keys, 64 of values, 128 columns of output, by 64 in float32.
    assert sizes.peak_bytes - sizes.nbytes == 2 * (256 + 64 + 64 + 128) * 64 * 4
