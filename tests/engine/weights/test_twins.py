"""A quantised checkpoint answers as its dequantised twin does, whatever mix of formats its layers are in."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from engine.kernels.torch.backend import TorchKernels
from engine.models.registry import load_model
from engine.weights.quantize import quantize_checkpoint
from tests.engine.models.driver import Driver
from tests.engine.weights import tiny_checkpoints as tiny
from tests.engine.weights.published import LAYOUTS, write_published, write_published_twin

PROMPT = [token * 7 % 64 for token in range(37)]


def logits_of(folder: Path) -> torch.Tensor:
    kernels = TorchKernels()
    driver = Driver(load_model(folder, kernels), kernels)
    sequence = driver.open()
    return torch.cat([driver.step([(sequence, PROMPT)]), driver.step([(sequence, [5])])])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_published_tensor_set_answers_as_its_twin(tmp_path: Path, layout: str) -> None:
    write_published_twin(write_published(layout, tmp_path / "checkpoint"), tmp_path / "twin")
    got, expected = logits_of(tmp_path / "checkpoint"), logits_of(tmp_path / "twin")
    assert expected.std() > 0.1
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_what_quantize_writes_answers_as_its_twin(tmp_path: Path) -> None:
    write_published("bf16 3.8", tmp_path / "source")
    quantize_checkpoint(tmp_path / "source", tmp_path / "checkpoint")
    stored = load_file(tmp_path / "checkpoint" / "model.safetensors")
    twin = {}
    for name, tensor in stored.items():
        if f"{name}_scale_2" in stored:
            twin[name] = tiny.nvfp4_values(tensor, stored[f"{name}_scale"], stored[f"{name}_scale_2"])
        elif tensor.dtype == torch.bfloat16 and name.startswith((tiny.LANGUAGE, "lm_head")):
            twin[name] = tensor.float()
    tiny.write_twin(tmp_path / "twin", twin)
    got, expected = logits_of(tmp_path / "checkpoint"), logits_of(tmp_path / "twin")
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
