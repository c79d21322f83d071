"""The published tensor sets load whole; one tensor more, less or of another shape is refused by its name."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import WeightsError
from engine.kernels.torch.backend import TorchKernels
from engine.models.registry import load_model
from engine.weights.checkpoint import open_checkpoint
from engine.weights.nvfp4 import dequantize_nvfp4
from tests.engine.weights.published import LAYOUTS, write_published

ATTENTION = "model.language_model.layers.3.self_attn"
LINEAR = "model.language_model.layers.0.linear_attn"
MLP = "model.language_model.layers.0.mlp"


def edit(folder: Path, name: str, tensor: torch.Tensor | None) -> None:
    """Put `tensor` in place of the one of that name (or beside the others), or take that out where it is None."""
    index_file = folder / "model.safetensors.index.json"
    weight_map = json.loads(index_file.read_text())["weight_map"] if index_file.is_file() else {}
    file = weight_map.get(name) or next(iter(sorted(weight_map.values())), "model.safetensors")
    tensors = load_file(folder / file)
    if tensor is None:
        del tensors[name]
        weight_map.pop(name, None)
    else:
        tensors[name] = tensor
        weight_map[name] = file
    save_file(tensors, folder / file, metadata={"format": "pt"})
    if index_file.is_file():
        index_file.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def load(folder: Path) -> None:
    load_model(folder, TorchKernels())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layer_holds_the_values_of_its_twin(tmp_path: Path, layout: str) -> None:
    published = write_published(layout, tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    for name, expected in published.twin.items():
        if expected.dim() == 2 and "embed_tokens" not in name:
            weight = checkpoint.linear(name.removesuffix(".weight"), *expected.shape)
            if hasattr(weight, "packed"):
                got = dequantize_nvfp4(weight)
            else:
                scale = getattr(weight, "scale", torch.tensor(1.0))
                got = weight.weight.float() * (scale if scale.dim() == 0 else scale.view(-1, 1))
        else:
            got = checkpoint.tensor(name, tuple(expected.shape)).float()
        torch.testing.assert_close(got, expected, rtol=3e-7, atol=0, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_tensor_that_no_layout_has_is_named(tmp_path: Path, layout: str) -> None:
    write_published(layout, tmp_path)
    edit(tmp_path, f"{ATTENTION}.k_proj.k_sign", torch.ones(1))
    with pytest.raises(WeightsError, match=re.escape(f"{ATTENTION}.k_proj.k_sign")):
        load(tmp_path)


MISSING = [
    ("bf16 3.5", f"{LINEAR}.A_log"),
    ("bf16 3.8", f"{LINEAR}.in_proj_b.weight"),
    ("modelopt mixed w4a16", f"{ATTENTION}.q_proj.weight_scale"),
    ("modelopt mixed w4a16", f"{LINEAR}.in_proj_qkv.weight_scale"),
    ("modelopt mixed w4a16", f"{MLP}.up_proj.weight_scale"),
    ("modelopt mixed w4a16", "lm_head.weight_scale_2"),
    ("modelopt mixed with kv scales", f"{ATTENTION}.k_proj.k_scale"),
    ("modelopt nvfp4 with kv scales", f"{ATTENTION}.v_proj.v_scale"),
    ("modelopt nvfp4, text only", "model.layers.3.self_attn.o_proj.weight_scale_2"),
    ("llm-compressor", f"{ATTENTION}.k_proj.weight_global_scale"),
    ("llm-compressor with out_proj", f"{LINEAR}.out_proj.weight_scale"),
    ("llm-compressor mixed", "lm_head.weight_scale"),
    ("llm-compressor mixed", f"{ATTENTION}.v_scale"),
]


@pytest.mark.parametrize(("layout", "name"), MISSING)
def test_a_missing_tensor_is_named(tmp_path: Path, layout: str, name: str) -> None:
    write_published(layout, tmp_path)
    edit(tmp_path, name, None)
    with pytest.raises(WeightsError, match=re.escape(f"{name} is missing")):
        load(tmp_path)


MISSHAPEN = [
    ("modelopt mixed w4a16", f"{ATTENTION}.q_proj.weight_scale", torch.ones(3)),
    ("modelopt mixed w4a4", f"{MLP}.down_proj.weight_scale", torch.ones(64, 5).to(torch.float8_e4m3fn)),
    ("modelopt mixed w4a4", f"{MLP}.down_proj.weight_scale_2", torch.ones(64)),
    ("llm-compressor", f"{MLP}.down_proj.input_global_scale", torch.ones(2)),
    ("llm-compressor mixed", f"{LINEAR}.in_proj_z.weight_scale", torch.ones(2, 1)),
    ("llm-compressor mixed", f"{ATTENTION}.k_scale", torch.ones(2, 1, 1)),
    ("modelopt mixed with kv scales", f"{ATTENTION}.v_proj.v_scale", torch.ones(2)),
]


@pytest.mark.parametrize(("layout", "name", "tensor"), MISSHAPEN)
def test_a_scale_of_a_wrong_shape_is_named(tmp_path: Path, layout: str, name: str, tensor: torch.Tensor) -> None:
    write_published(layout, tmp_path)
    edit(tmp_path, name, tensor)
    with pytest.raises(WeightsError, match=re.escape(name)):
        load(tmp_path)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_kv_scale_that_is_not_a_positive_number_is_refused(tmp_path: Path, value: float) -> None:
    write_published("llm-compressor mixed", tmp_path)
    edit(tmp_path, f"{ATTENTION}.k_scale", torch.tensor([value]))
    with pytest.raises(WeightsError, match=re.escape(f"{ATTENTION}.k_scale holds a scale that is zero")):
        load(tmp_path)


def test_kv_scales_in_two_spellings_are_refused(tmp_path: Path) -> None:
    write_published("llm-compressor mixed", tmp_path)
    edit(tmp_path, f"{ATTENTION}.k_proj.k_scale", torch.tensor(0.1))
    with pytest.raises(WeightsError, match=re.escape(f"{ATTENTION}.v_proj.v_scale is missing")):
        load(tmp_path)
    edit(tmp_path, f"{ATTENTION}.v_proj.v_scale", torch.tensor(0.1))
    with pytest.raises(WeightsError, match=re.escape(f"not used by this architecture: {ATTENTION}.k_scale")):
        load(tmp_path)
