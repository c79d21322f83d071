"""The published tensor sets load whole; one tensor more, less or of another shape is refused by its name."""

import copy
import json
import logging
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import WeightsError
from engine.kernels.torch.backend import TorchKernels
from engine.models.registry import load_model
from engine.weights.checkpoint import open_checkpoint
from engine.weights.formats import Nvfp4Weight
from engine.weights.nvfp4 import dequantize_nvfp4
from tests.engine.weights.published import LAYOUTS, write_published
from tests.engine.weights.tiny_checkpoints import TINY_CONFIG

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


# Tensors by dtype, with the 64 layers and 27 vision blocks of the 27B models. The sums of the quantised ones (2194,
# 2001, 2111, 1968), and the dtypes of the weights-only and of the last, are those of the published files' headers.
FULL_SIZE = {
    "bf16 3.8": {"BF16": 1199},
    "modelopt mixed w4a16": {"BF16": 798, "F32": 802, "F8_E4M3": 401, "U8": 193},
    "modelopt mixed, weights only": {"BF16": 798, "F32": 609, "F8_E4M3": 401, "U8": 193},
    "llm-compressor with out_proj": {"BF16": 895, "F32": 608, "F8_E4M3": 304, "U8": 304},
    "llm-compressor mixed": {"BF16": 1063, "F32": 336, "F8_E4M3": 401, "U8": 168},
}


@pytest.mark.parametrize("layout", FULL_SIZE)
def test_as_deep_as_the_published_model_a_layout_has_as_many_tensors_of_each_dtype(tmp_path: Path, layout: str) -> None:
    config = copy.deepcopy(TINY_CONFIG)
    kinds = (["linear_attention"] * 3 + ["full_attention"]) * 16
    config["text_config"] |= {"layer_types": kinds, "num_hidden_layers": len(kinds)}
    config["vision_config"]["depth"] = 27
    write_published(layout, tmp_path, config=config)
    checkpoint = open_checkpoint(tmp_path)
    assert Counter(checkpoint.entry(name).dtype for name in checkpoint.names()) == FULL_SIZE[layout]


@pytest.mark.parametrize(
    ("layout", "has_scale"),
    [("modelopt mixed w4a4", True), ("modelopt mixed w4a16", False), ("llm-compressor with out_proj", True)],
)
def test_nvfp4_layers_have_a_scale_for_activations_only_where_these_are_to_be_quantised(
    tmp_path: Path, layout: str, has_scale: bool
) -> None:
    config = write_published(layout, tmp_path).config["text_config"]
    checkpoint = open_checkpoint(tmp_path)
    weight = checkpoint.linear(f"{MLP}.up_proj", config["intermediate_size"], config["hidden_size"])
    assert isinstance(weight, Nvfp4Weight)
    assert (weight.input_scale is not None) == has_scale


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


def declare_kv_cache(folder: Path, algorithm: str) -> None:
    path = folder / "hf_quant_config.json"
    statement = json.loads(path.read_text())
    statement["quantization"]["kv_cache_quant_algo"] = algorithm
    path.write_text(json.dumps(statement))


OTHER_KV_CACHES = {
    "another format": (lambda folder: declare_kv_cache(folder, "NVFP4"), "a KV cache in NVFP4"),
    "an offset of the keys": (
        lambda folder: edit(folder, f"{ATTENTION}.k_proj.k_bias", torch.zeros(64)),
        "keys and values with an offset",
    ),
}


@pytest.mark.parametrize("case", OTHER_KV_CACHES)
def test_kv_scales_that_are_not_for_fp8_pages_are_passed_over_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, case: str
) -> None:
    change, reason = OTHER_KV_CACHES[case]
    write_published("modelopt mixed with kv scales", tmp_path)
    change(tmp_path)
    with caplog.at_level(logging.INFO, "dalsegno.weights"):
        model = load_model(tmp_path, TorchKernels())
    assert not model.has_kv_scales
    assert f"{reason}; fp8 pages use the scale 1" in caplog.text


@pytest.mark.parametrize("name", ["q_scale", "attn.prob_scale", "k_bmm_quantizer._amax"])
def test_scales_of_what_is_not_quantised_here_are_passed_over_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    write_published("llm-compressor mixed", tmp_path)
    edit(tmp_path, f"{ATTENTION}.{name}", torch.ones(1))
    with caplog.at_level(logging.INFO, "dalsegno.weights"):
        assert load_model(tmp_path, TorchKernels()).has_kv_scales
    assert f"{ATTENTION}.{name}" in caplog.text
