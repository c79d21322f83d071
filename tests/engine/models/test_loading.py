"""Checkpoints whose tensors are more or fewer than the architecture has."""

from __future__ import annotations

import logging

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import WeightsError
from engine.kernels.select import select_kernels
from engine.models.registry import load_model
from tests.engine.models import cases
from tests.engine.models.driver import Driver, make_twin


def load(folder):
    return load_model(folder, select_kernels("torch"))


def logits_of(folder):
    model = load(folder)
    driver = Driver(model, select_kernels("torch"))
    return driver.step([(driver.open(), [1, 2, 3])])


def change(folder, add=None, remove=()):
    path = folder / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(path).items() if name not in remove}
    save_file({**tensors, **(add or {})}, path, metadata={"format": "pt"})


def test_vision_and_mtp_tensors_are_passed_over_and_logged(tmp_path, caplog):
    make_twin(cases.qwen3_5_full(), tmp_path)
    assert any(name.startswith("model.visual.") for name in load_file(tmp_path / "model.safetensors"))
    plain = logits_of(tmp_path)
    change(tmp_path, add={"mtp.fc.weight": torch.zeros(3)})
    with caplog.at_level(logging.INFO, logger="dalsegno"):
        assert torch.equal(logits_of(tmp_path), plain)
    assert "vision" in caplog.text
    assert "multi-token prediction" in caplog.text


def test_a_tied_model_passes_over_a_head_of_its_own(tmp_path):
    make_twin(cases.llama(tie_word_embeddings=True), tmp_path)
    plain = logits_of(tmp_path)
    change(tmp_path, add={"lm_head.weight": torch.randn(256, 64)})
    assert torch.equal(logits_of(tmp_path), plain)


@pytest.mark.parametrize("name", ["model.norm.weight", "lm_head.weight", "model.layers.2.self_attn.k_norm.weight"])
def test_a_missing_tensor_is_named(tmp_path, name):
    make_twin(cases.qwen3(), tmp_path)
    change(tmp_path, remove=(name,))
    with pytest.raises(WeightsError, match=name.replace(".", r"\.")):
        load(tmp_path)


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.q_proj.bias", "model.layers.9.mlp.up_proj.weight"])
def test_a_tensor_that_the_architecture_has_no_use_for_is_named(tmp_path, name):
    make_twin(cases.qwen3(), tmp_path)
    change(tmp_path, add={name: torch.zeros(4)})
    with pytest.raises(WeightsError, match=name.replace(".", r"\.")):
        load(tmp_path)


def test_a_tensor_of_a_wrong_shape_is_named(tmp_path):
    make_twin(cases.qwen3_5(), tmp_path)
    change(tmp_path, add={"model.layers.0.linear_attn.conv1d.weight": torch.zeros(64, 1, 4)})
    with pytest.raises(WeightsError, match=r"layers\.0\.linear_attn\.conv1d\.weight"):
        load(tmp_path)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", cases.MAIN)
def test_half_precision_checkpoints_compute_in_float32(tmp_path, name, dtype):
    twin = make_twin(cases.MAIN[name](), tmp_path, dtype=dtype)
    with torch.no_grad():
        theirs = twin(torch.tensor([[1, 2, 3]])).logits[0, -1:]
    torch.testing.assert_close(logits_of(tmp_path), theirs, atol=1e-3, rtol=1e-4)


def test_weight_bytes_count_every_matrix_in_the_compute_dtype(tmp_path):
    make_twin(cases.llama(), tmp_path, dtype=torch.bfloat16)
    parameters = sum(tensor.numel() for tensor in load_file(tmp_path / "model.safetensors").values())
    rope_table, embedding_saving = 1024 * 16 * 4, 256 * 64 * 2
    assert load(tmp_path).weight_bytes == parameters * 4 + rope_table - embedding_saving
