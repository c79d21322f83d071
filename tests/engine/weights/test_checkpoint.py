import contextlib
import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from engine.errors import WeightsError
from engine.weights.checkpoint import Checkpoint, open_checkpoint
from engine.weights.formats import DenseWeight, Fp8Weight, LinearWeight, Nvfp4Weight
from engine.weights.nvfp4 import dequantize_nvfp4
from tests.engine.weights import tiny_checkpoints as tiny

OUT, IN = 8, 32
Tensors = dict[str, torch.Tensor]


def matrix() -> torch.Tensor:
    return torch.randn(OUT, IN, generator=torch.Generator().manual_seed(7))


def dense() -> Tensors:
    return {"a.weight": matrix()}


def fp8() -> Tensors:
    return tiny.fp8_tensors("a", matrix())


def modelopt() -> Tensors:
    return tiny.modelopt_nvfp4_tensors("a", matrix())


def compressed() -> Tensors:
    return tiny.compressed_nvfp4_tensors("a", matrix())


def saved(folder: Path, tensors: Tensors, config: dict | None = None) -> Path:
    tiny.write_folder(folder, config or {}, tensors, shards=1)
    return folder


def values(weight: LinearWeight) -> torch.Tensor:
    if isinstance(weight, Nvfp4Weight):
        return dequantize_nvfp4(weight)
    if isinstance(weight, Fp8Weight):
        return weight.weight.float() * weight.scale.view(-1, 1)
    return weight.weight.float()


# What comes out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_dense_layer_keeps_its_dtype_and_values(tmp_path: Path, dtype: torch.dtype) -> None:
    checkpoint = open_checkpoint(saved(tmp_path, {"a.weight": matrix().to(dtype), "a.bias": torch.ones(OUT)}))
    weight = checkpoint.linear("a", OUT, IN, has_bias=True)
    assert isinstance(weight, DenseWeight)
    assert torch.equal(weight.weight, matrix().to(dtype))
    assert weight.bias is not None
    checkpoint.finish()


@pytest.mark.parametrize(
    ("scale", "expected"),
    [
        (torch.tensor(0.5), ()),
        (torch.tensor([0.5]), ()),
        (torch.full((OUT,), 0.5), (OUT,)),
        (torch.full((OUT, 1), 0.5), (OUT,)),
        (torch.full((OUT, 1), 0.5, dtype=torch.bfloat16), (OUT,)),
    ],
)
def test_fp8_scales_come_out_as_a_scalar_or_one_per_row(
    tmp_path: Path, scale: torch.Tensor, expected: tuple[int, ...]
) -> None:
    checkpoint = open_checkpoint(saved(tmp_path, fp8() | {"a.weight_scale": scale}))
    weight = checkpoint.linear("a", OUT, IN)
    assert isinstance(weight, Fp8Weight)
    assert (weight.scale.shape, weight.scale.dtype) == (expected, torch.float32)
    checkpoint.finish()


def test_both_nvfp4_layouts_of_one_matrix_give_equal_weights(tmp_path: Path) -> None:
    theirs = compressed()
    same = {
        "b.weight": theirs["a.weight_packed"].clone(),
        "b.weight_scale": theirs["a.weight_scale"].clone(),
        "b.weight_scale_2": 1 / theirs["a.weight_global_scale"][0],
    }
    checkpoint = open_checkpoint(saved(tmp_path, theirs | same))
    assert torch.equal(values(checkpoint.linear("a", OUT, IN)), values(checkpoint.linear("b", OUT, IN)))
    checkpoint.finish()


def test_input_scales_are_carried_and_multiply_in_both_layouts(tmp_path: Path) -> None:
    tensors = compressed() | {"a.input_global_scale": torch.tensor([4.0])}
    tensors |= tiny.modelopt_nvfp4_tensors("b", matrix()) | {"b.input_scale": torch.tensor(0.25)}
    checkpoint = open_checkpoint(saved(tmp_path, tensors))
    for layer in ("a", "b"):
        weight = checkpoint.linear(layer, OUT, IN)
        assert isinstance(weight, Nvfp4Weight)
        assert weight.input_scale is not None
        assert weight.input_scale.item() == 0.25


def test_tensors_are_views_of_the_file_and_outlive_the_checkpoint(tmp_path: Path) -> None:
    with open_checkpoint(saved(tmp_path, dense())) as checkpoint:
        tensor = checkpoint.tensor("a.weight")
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line]
    assert mapped
    assert torch.equal(tensor, matrix())


def test_a_tensor_may_be_used_twice(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(saved(tmp_path, dense()))
    assert checkpoint.tensor("a.weight").data_ptr() == checkpoint.tensor("a.weight").data_ptr()
    checkpoint.finish()


def test_skipping_is_logged_with_count_and_bytes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = open_checkpoint(saved(tmp_path, {"mtp.a": torch.zeros(4), "x.mtp": torch.zeros(2), "b": matrix()}))
    with caplog.at_level(logging.INFO, "dalsegno.weights"):
        checkpoint.skip(["mtp.", "*.mtp"], "not used here")
    assert "2 tensors (24 bytes)" in caplog.text
    assert "not used here" in caplog.text


def test_loading_reports_all_bytes_as_done(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = open_checkpoint(saved(tmp_path, {"a.weight": matrix(), "b": torch.zeros(256), "mtp.c": matrix()}))
    with caplog.at_level(logging.INFO, "dalsegno.progress"):
        checkpoint.tensor("b")
        checkpoint.skip(["mtp."], "not used")
        checkpoint.linear("a", OUT, IN)
    assert "3072 of 3072 bytes" in caplog.text


# What is refused: a layer


LAYER_CASES: dict[str, tuple[Callable[[], Tensors], str]] = {
    "missing": (dict, r"tensor a\.weight is missing"),
    "shape": (lambda: {"a.weight": torch.zeros(OUT, IN + 1)}, r"a\.weight has shape \[8, 33\]; expected \[8, 32\]"),
    "dtype": (lambda: {"a.weight": torch.zeros(OUT, IN, dtype=torch.int8)}, r"a\.weight is I8; expected"),
    "e5m2": (lambda: {"a.weight": matrix().to(torch.float8_e5m2)}, r"a\.weight is F8_E5M2; expected"),
    "dense with scale": (
        lambda: dense() | {"a.weight_scale": torch.tensor(1.0)},
        r"a\.weight_scale does not belong to a weight that is not quantised",
    ),
    "scale without weight": (lambda: {"a.weight_scale": torch.tensor(1.0)}, r"a\.weight_scale is there without its"),
    "fp8 without scale": (lambda: {"a.weight": fp8()["a.weight"]}, r"a\.weight_scale is missing: an fp8 weight"),
    "fp8 scale shape": (
        lambda: fp8() | {"a.weight_scale": torch.ones(2)},
        r"a\.weight_scale has shape \[2\]; expected one value, or one for each of 8 rows",
    ),
    "fp8 block": (
        lambda: {"a.weight": fp8()["a.weight"], "a.weight_scale_inv": torch.ones(1, 1)},
        r"a\.weight_scale_inv: block-wise fp8",
    ),
    "fp8 scale dtype": (
        lambda: fp8() | {"a.weight_scale": torch.ones((), dtype=torch.int32)},
        r"a\.weight_scale is I32; expected F32",
    ),
    "fp8 scale zero": (lambda: fp8() | {"a.weight_scale": torch.zeros(OUT)}, r"a\.weight_scale holds .* zero"),
    "fp8 with weight_scale_2": (
        lambda: fp8() | {"a.weight_scale_2": torch.tensor(1.0)},
        r"a\.weight_scale_2 does not belong to an fp8 weight",
    ),
    "fp8 input scale shape": (lambda: fp8() | {"a.input_scale": torch.ones(3)}, r"a\.input_scale has shape \[3\]"),
    "modelopt without block scale": (
        lambda: {k: v for k, v in modelopt().items() if k != "a.weight_scale"},
        r"a\.weight_scale is missing: NVFP4 needs",
    ),
    "modelopt without global scale": (
        lambda: {k: v for k, v in modelopt().items() if k != "a.weight_scale_2"},
        r"a\.weight_scale_2 is missing",
    ),
    "modelopt zero global scale": (
        lambda: modelopt() | {"a.weight_scale_2": torch.tensor(0.0)},
        r"a\.weight_scale_2 holds a scale that is zero",
    ),
    "modelopt nan global scale": (
        lambda: modelopt() | {"a.weight_scale_2": torch.tensor(torch.nan)},
        r"a\.weight_scale_2 holds .* not a number",
    ),
    "modelopt scale dtype": (
        lambda: modelopt() | {"a.weight_scale": torch.ones(OUT, IN // 16)},
        r"a\.weight_scale is F32 \[8, 2\]; expected F8_E4M3 \[8, 2\]",
    ),
    "modelopt scale shape": (
        lambda: modelopt() | {"a.weight_scale": torch.ones(OUT, IN // 32).to(torch.float8_e4m3fn)},
        r"a\.weight_scale is F8_E4M3 \[8, 1\]; expected F8_E4M3 \[8, 2\]",
    ),
    "modelopt nan scale": (
        lambda: modelopt() | {"a.weight_scale": torch.full((OUT, IN // 16), torch.nan).to(torch.float8_e4m3fn)},
        r"a\.weight_scale holds values that are not numbers",
    ),
    "modelopt packed shape": (
        lambda: modelopt() | {"a.weight": torch.zeros(OUT, IN, dtype=torch.uint8)},
        r"a\.weight is U8 \[8, 32\]; expected U8 \[8, 16\]",
    ),
    "awq from modelopt": (lambda: modelopt() | {"a.pre_quant_scale": torch.ones(IN)}, r"a\.pre_quant_scale: ModelOpt"),
    "compressed without global scale": (
        lambda: {k: v for k, v in compressed().items() if k != "a.weight_global_scale"},
        r"a\.weight_global_scale is missing",
    ),
    "compressed zero global scale": (
        lambda: compressed() | {"a.weight_global_scale": torch.zeros(1)},
        r"a\.weight_global_scale holds a scale that is zero",
    ),
    "compressed int4": (
        lambda: compressed() | {"a.weight_packed": torch.zeros(OUT, IN // 8, dtype=torch.int32)},
        r"a\.weight_packed is I32 \[8, 4\]; expected U8",
    ),
    "mxfp4": (
        lambda: {
            "a.weight_packed": torch.zeros(OUT, IN // 2, dtype=torch.uint8),
            "a.weight_scale": torch.ones(OUT, 1, dtype=torch.uint8),
        },
        r"a\.weight_global_scale is missing",
    ),
    "both layouts": (
        lambda: compressed() | {"a.weight": matrix()},
        r"a\.weight does not belong to an NVFP4 weight as compressed-tensors",
    ),
    "gptq": (lambda: {"a.qweight": torch.zeros(4, 8, dtype=torch.int32)}, r"a\.qweight: AWQ or GPTQ is not supported"),
}


@pytest.mark.parametrize("case", LAYER_CASES)
def test_a_layer_that_does_not_add_up_is_refused_by_its_tensors_name(tmp_path: Path, case: str) -> None:
    tensors, message = LAYER_CASES[case]
    checkpoint = open_checkpoint(saved(tmp_path, tensors() | {"other": torch.zeros(1)}))
    with pytest.raises(WeightsError, match=message):
        checkpoint.linear("a", OUT, IN)


def test_nvfp4_with_in_features_that_do_not_fill_blocks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"a\.weight .* 24 in-features; expected a multiple of 16"):
        open_checkpoint(saved(tmp_path, modelopt())).linear("a", OUT, 24)


@pytest.mark.parametrize(
    ("tensors", "shape", "message"),
    [
        ({}, None, "tensor n is missing"),
        ({"n": torch.zeros(3)}, (4,), r"n has shape \[3\]; expected \[4\]"),
        ({"n": torch.zeros(3, dtype=torch.uint8)}, (3,), "n is U8; expected float32"),
    ],
)
def test_a_plain_tensor_that_does_not_fit_is_refused(
    tmp_path: Path, tensors: Tensors, shape: tuple[int, ...] | None, message: str
) -> None:
    with pytest.raises(WeightsError, match=message):
        open_checkpoint(saved(tmp_path, tensors | dense())).tensor("n", shape)


def test_a_bias_that_the_architecture_does_not_have_is_left_over(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(saved(tmp_path, dense() | {"a.bias": torch.zeros(OUT)}))
    checkpoint.linear("a", OUT, IN)
    with pytest.raises(WeightsError, match=r"1 tensors .* a\.bias"):
        checkpoint.finish()


def test_left_over_tensors_are_counted_and_the_first_are_named(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(saved(tmp_path, {f"t{i}": torch.zeros(1) for i in range(7)}))
    checkpoint.tensor("t0")
    with pytest.raises(WeightsError, match=r"6 tensors .* t1, t2, t3, t4, t5, \.\.\.;"):
        checkpoint.finish()


# What is refused: the statement about the quantisation


@pytest.mark.parametrize(
    ("ignore", "is_refused"),
    [
        (["a"], True),
        (["lm_head", "re:^a$"], True),
        (["a*"], True),
        (["aa", "re:b.*", "*.a"], False),
    ],
)
def test_a_layer_that_is_excluded_and_yet_quantised_is_refused(
    tmp_path: Path, ignore: list[str], is_refused: bool
) -> None:
    config = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ignore}}
    checkpoint = open_checkpoint(saved(tmp_path, modelopt(), config))
    if not is_refused:
        checkpoint.linear("a", OUT, IN)
        return
    with pytest.raises(WeightsError, match="layer a is quantised, but the quantisation config excludes it"):
        checkpoint.linear("a", OUT, IN)


def test_the_exclude_list_of_hf_quant_config_counts_too(tmp_path: Path) -> None:
    folder = saved(tmp_path, modelopt())
    quantization = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "exclude_modules": ["a*"]}
    tiny.write_json(folder / "hf_quant_config.json", {"producer": {"name": "modelopt"}, "quantization": quantization})
    with pytest.raises(WeightsError, match="excludes it"):
        open_checkpoint(folder).linear("a", OUT, IN)


def test_an_excluded_layer_that_is_not_quantised_is_fine(tmp_path: Path) -> None:
    config = {"quantization_config": {"quant_method": "compressed-tensors", "ignore": ["re:.*"]}}
    open_checkpoint(saved(tmp_path, dense(), config)).linear("a", OUT, IN)


def test_fp8_without_blocks_is_read_whatever_wrote_it(tmp_path: Path) -> None:
    config = {"quantization_config": {"quant_method": "fp8", "activation_scheme": "static"}}
    assert isinstance(open_checkpoint(saved(tmp_path, fp8(), config)).linear("a", OUT, IN), Fp8Weight)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"quant_method": "awq"}, "quant_method 'awq' is not supported"),
        ({"quant_method": "gptq", "bits": 4}, "'gptq'"),
        ({"quant_method": "mxfp4"}, "'mxfp4'"),
        ({"quant_method": "bitsandbytes"}, "'bitsandbytes'"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, r"blocks of \[128, 128\] \(weight_scale_inv\)"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "'pack-quantized'"),
        ({"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}, "'mxfp4-pack-quantized'"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, "'NVFP4_AWQ'"),
        ({"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}, "'FP8_PB_WO'"),
        ({"bits": 4, "group_size": 64}, "quant_method 'none' is not supported"),
        ({"quant_method": "modelopt", "ignore": ["re:("]}, r"'re:\('.* no regular expression"),
        ("fp4", "quantization_config is a str"),
    ],
)
def test_a_quantisation_that_is_not_read_here_is_refused_by_name(tmp_path: Path, section: object, message: str) -> None:
    folder = saved(tmp_path, dense(), {"quantization_config": section})
    with pytest.raises(WeightsError, match=message):
        open_checkpoint(folder)


# What is refused: the files


def single(folder: Path) -> Path:
    save_file({"a": torch.arange(8.0)}, folder / "model.safetensors")
    return folder / "model.safetensors"


def sharded(folder: Path) -> Path:
    tiny.write_folder(folder, {}, {name: torch.zeros(1) for name in "abc"}, shards=2)
    return folder / "model.safetensors.index.json"


def edit_index(folder: Path, change: Callable[[dict[str, str]], object]) -> None:
    index = json.loads(sharded(folder).read_text())
    change(index["weight_map"])
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def truncate(folder: Path, size: int) -> None:
    with single(folder).open("r+b") as stream:
        stream.truncate(size)


def overwrite(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)


def duplicate(folder: Path) -> None:
    sharded(folder)
    save_file({"a": torch.zeros(1), "b": torch.zeros(1)}, folder / "model-00002-of-00002.safetensors")


SHARD_2 = "model-00002-of-00002.safetensors"
FILE_CASES: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty folder": (lambda d: None, r"no model\.safetensors"),
    "gguf": (lambda d: (d / "m.gguf").touch(), r"m\.gguf is there, but only safetensors are read"),
    "pytorch": (lambda d: (d / "pytorch_model.bin").touch(), r"pytorch_model\.bin is there"),
    "no index": (lambda d: (sharded(d), (d / "model.safetensors.index.json").unlink()), "2 safetensors files .* no"),
    "truncated tensor": (lambda d: truncate(d, 100), "truncated or overwritten: 100 bytes"),
    "truncated header": (lambda d: truncate(d, 20), "not a whole safetensors file: 20 bytes"),
    "empty file": (lambda d: overwrite(d, b""), "not a whole safetensors file: 0 bytes"),
    "not safetensors": (lambda d: overwrite(d, b"<html>not found</html>" * 9), "not a whole safetensors file"),
    "corrupt header": (lambda d: overwrite(d, (4).to_bytes(8, "little") + b"{]]}"), "header is corrupt"),
    "header is a list": (lambda d: overwrite(d, (2).to_bytes(8, "little") + b"[]"), "header is corrupt"),
    "wrong size in header": (
        lambda d: overwrite(
            d,
            (63).to_bytes(8, "little") + b'{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}'.ljust(63) + b"8" * 8,
        ),
        "tensor a: F32 .* takes 12 bytes, not 8",
    ),
    "missing shard": (lambda d: (sharded(d), (d / SHARD_2).unlink()), f"names the shard {SHARD_2}, which is not there"),
    "index without the tensor": (
        lambda d: edit_index(d, lambda m: m.pop("c")),
        f"does not list c, which is in {SHARD_2}",
    ),
    "index with another tensor": (
        lambda d: edit_index(d, lambda m: m.update(z=SHARD_2)),
        "says that tensor z is in .*, but it is in none of the shards",
    ),
    "index with the wrong shard": (
        lambda d: edit_index(d, lambda m: m.update(a=SHARD_2, b="model-00001-of-00002.safetensors")),
        r"says that tensor a is in .*, but it is in model-00001",
    ),
    "index outside": (lambda d: edit_index(d, lambda m: m.update(a="../x")), "said to be in '../x'"),
    "index is no json": (lambda d: sharded(d).write_text("{"), r"index\.json: not valid JSON"),
    "index is a list": (lambda d: sharded(d).write_text("[]"), "expected a JSON object"),
    "index without map": (lambda d: sharded(d).write_text("{}"), "expected an object `weight_map`"),
    "duplicate": (duplicate, "tensor a is in two shards"),
    "both layouts": (lambda d: (sharded(d), single(d)), "holds both"),
    "config is no json": (lambda d: (single(d), (d / "config.json").write_text("{")), r"config\.json: not valid JSON"),
}


@pytest.mark.parametrize("case", FILE_CASES)
def test_a_broken_folder_is_refused_with_the_file_at_fault(tmp_path: Path, case: str) -> None:
    prepare, message = FILE_CASES[case]
    prepare(tmp_path)
    with pytest.raises(WeightsError, match=message):
        open_checkpoint(tmp_path)


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_a_damaged_file_opens_or_is_refused_and_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    file = folder / "model.safetensors"
    save_file({"a": torch.arange(3.0), "b": torch.zeros(2, 2)}, file)
    content = bytearray(file.read_bytes())
    for position, byte in data.draw(
        st.lists(st.tuples(st.integers(0, len(content) - 1), st.integers(0, 255)), min_size=1, max_size=4)
    ):
        content[position] = byte
    file.write_bytes(content[: data.draw(st.integers(0, len(content)))] if data.draw(st.booleans()) else content)
    with contextlib.suppress(WeightsError):
        checkpoint = open_checkpoint(folder)
        for name in checkpoint.names():
            checkpoint.tensor(name)


def test_a_path_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    file = single(tmp_path)
    with pytest.raises(WeightsError, match="is a file; expected a folder"):
        open_checkpoint(file)
    with pytest.raises(WeightsError, match="does not exist; expected a folder"):
        open_checkpoint(tmp_path / "nowhere")


def test_one_safetensors_file_of_any_name_is_enough(tmp_path: Path) -> None:
    single(tmp_path).rename(tmp_path / "weights.safetensors")
    assert open_checkpoint(tmp_path).names() == ("a",)


def test_names_and_has_tell_what_is_there(tmp_path: Path) -> None:
    checkpoint: Checkpoint = open_checkpoint(saved(tmp_path, dense()))
    assert checkpoint.has("a.weight")
    assert not checkpoint.has("a.bias")
