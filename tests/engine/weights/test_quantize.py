import json
import logging
import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor
from compressed_tensors.entrypoints.convert.converters.modelopt_nvfp4 import ModelOptNvfp4Converter
from compressed_tensors.quantization import preset_name_to_scheme
from safetensors.torch import load_file, save_file

from engine.errors import WeightsError
from engine.weights import quantize
from engine.weights.checkpoint import open_checkpoint
from engine.weights.formats import DenseWeight, Nvfp4Weight
from engine.weights.nvfp4 import dequantize_nvfp4
from engine.weights.quantization_config import read_quantization_config
from engine.weights.quantize import quantize_checkpoint
from tests.engine.weights import tiny_checkpoints as tiny
from tests.engine.weights.published import write_published

LAYER_0 = "model.language_model.layers.0."
LAYER_3 = "model.language_model.layers.3."


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    write_published("bf16 3.8", folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        tiny.write_json(folder / name, {"from": name})
    for name in (
        "chat_template.jinja",
        "merges.txt",
        "LICENSE",
        "README.md",
        "modeling_x.py",
        "pytorch_model.bin.index.json",
    ):
        (folder / name).write_text(name)
    return folder


@pytest.fixture(scope="module")
def quantized(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("out") / "nvfp4"
    quantize_checkpoint(source, folder)
    return folder


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def small(folder: Path, config: dict | None = None, **tensors: torch.Tensor) -> Path:
    weights = {"model.layers.0.mlp.up_proj.weight": torch.randn(4, 32)} | tensors
    tiny.write_folder(folder, config or {"dtype": "float32"}, weights, shards=1)
    return folder


def test_the_projections_are_rounded_and_nothing_else_is_touched(source: Path, quantized: Path) -> None:
    before, after = tensors_of(source), tensors_of(quantized)
    rounded = {name.removesuffix("_scale_2") for name in after if name.endswith(".weight_scale_2")}
    expected = {
        name
        for name in before
        if name.startswith("model.language_model.") and name.split(".")[-2] in quantize.QUANTIZED_LAYERS
    }
    assert rounded == expected
    assert len(rounded) == 3 * 3 + 4 + 4 * 3
    untouched = before.keys() - rounded
    assert all(after[name].dtype == before[name].dtype for name in untouched)
    assert all(torch.equal(after[name], before[name]) for name in untouched)


def test_whoever_serves_it_may_read_it(quantized: Path) -> None:
    assert all(path.stat().st_mode & 0o444 == 0o444 for path in quantized.iterdir())


def test_what_modelopt_keeps_in_bfloat16_is_kept(quantized: Path) -> None:
    with open_checkpoint(quantized) as checkpoint:
        for name in ("in_proj_a", "in_proj_b", "conv1d", "norm"):
            assert checkpoint.tensor(f"{LAYER_0}linear_attn.{name}.weight").dtype == torch.bfloat16
        assert isinstance(checkpoint.linear("lm_head", 64, 64), DenseWeight)
        assert checkpoint.tensor("model.language_model.embed_tokens.weight").dtype == torch.bfloat16


def test_the_result_opens_and_is_close_to_its_source(source: Path, quantized: Path) -> None:
    before = tensors_of(source)
    with open_checkpoint(quantized) as checkpoint:
        weight = checkpoint.linear(f"{LAYER_3}self_attn.o_proj", 64, 128)
    assert isinstance(weight, Nvfp4Weight)
    original = before[f"{LAYER_3}self_attn.o_proj.weight"].float()
    assert (dequantize_nvfp4(weight) - original).norm() / original.norm() < 0.12


def test_compressed_tensors_own_modelopt_converter_reads_the_same_weights(quantized: Path) -> None:
    layer = f"{LAYER_3}mlp.down_proj"
    stored = {name: tensor for name, tensor in tensors_of(quantized).items() if name.startswith(layer)}
    converted = ModelOptNvfp4Converter(targets=["re:.*_proj$"]).validate(stored)
    state = {name.rpartition(".")[2]: tensor for name, tensor in converted.items()}
    state["weight_global_scale"] = state["weight_global_scale"].view(1)  # as stored; a scalar would compute in bfloat16
    theirs = NVFP4PackedCompressor.decompress(state, preset_name_to_scheme("NVFP4", ["Linear"]))["weight"]
    with open_checkpoint(quantized) as checkpoint:
        ours = checkpoint.linear(layer, 64, 96)
    assert isinstance(ours, Nvfp4Weight)
    # The converter takes the reciprocal of the global scale, so that some values round to the next bfloat16.
    torch.testing.assert_close(dequantize_nvfp4(ours, torch.bfloat16), theirs, rtol=2**-8, atol=0)


@pytest.mark.parametrize(
    "group",
    [
        [f"{LAYER_3}self_attn.{name}_proj" for name in "qkv"],
        [f"{LAYER_3}mlp.gate_proj", f"{LAYER_3}mlp.up_proj"],
        [f"{LAYER_0}linear_attn.in_proj_qkv", f"{LAYER_0}linear_attn.in_proj_z"],
    ],
)
def test_layers_that_engines_stack_share_the_global_scale_of_their_common_maximum(
    source: Path, quantized: Path, group: list[str]
) -> None:
    before, after = tensors_of(source), tensors_of(quantized)
    scales = {after[f"{layer}.weight_scale_2"].item() for layer in group}
    amax = max(before[f"{layer}.weight"].float().abs().max() for layer in group)
    assert scales == {(amax / (6 * 448)).item()}


def test_the_report_tells_each_layers_error_and_the_bytes(source: Path, tmp_path: Path) -> None:
    report = quantize_checkpoint(source, tmp_path / "out")
    before = tensors_of(source)
    with open_checkpoint(tmp_path / "out") as checkpoint:
        for layer in report.layers:
            original = before[f"{layer.name}.weight"].float()
            rounded = dequantize_nvfp4(checkpoint.linear(layer.name, *original.shape))  # type: ignore[arg-type]
            assert layer.relative_error == pytest.approx(((rounded - original).norm() / original.norm()).item())
    assert len(report.layers) == 25
    assert report.source_bytes == sum(tensor.nbytes for tensor in before.values())
    assert report.written_bytes == sum(tensor.nbytes for tensor in tensors_of(tmp_path / "out").values())
    assert report.kept == ()


def test_both_configs_say_what_was_done(quantized: Path) -> None:
    config = json.loads((quantized / "config.json").read_text())
    assert config["model_type"] == "qwen3_5"
    section = config["quantization_config"]
    assert (section["quant_method"], section["quant_algo"]) == ("modelopt", "W4A16_NVFP4")
    assert section["config_groups"]["group_0"]["weights"]["group_size"] == 16
    external = json.loads((quantized / "hf_quant_config.json").read_text())["quantization"]
    assert external["exclude_modules"] == section["ignore"]
    assert external["group_size"] == 16
    stated = read_quantization_config(quantized)
    assert stated is not None
    kept = (
        "lm_head",
        f"{LAYER_0}linear_attn.conv1d",
        f"{LAYER_0}linear_attn.in_proj_a",
        "model.visual.blocks.0.attn.qkv",
    )
    assert all(stated.ignores(module) for module in (*kept, "mtp.layers.0.self_attn.q_proj"))
    assert not stated.ignores(f"{LAYER_0}linear_attn.in_proj_z")


def test_tokenizer_templates_and_licences_go_along_and_nothing_else(quantized: Path) -> None:
    names = {file.name for file in quantized.iterdir()}
    assert names == {
        "config.json",
        "hf_quant_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
        "chat_template.jinja",
        "merges.txt",
        "LICENSE",
    }


def test_a_float32_source_becomes_bfloat16_except_the_decay_parameters(tmp_path: Path) -> None:
    folder = small(
        tmp_path / "in",
        {"dtype": "float32", "text_config": {"dtype": "float32"}},
        **{"l.norm.weight": torch.ones(4), "l.A_log": torch.ones(4), "l.dt_bias": torch.ones(4)},
    )
    quantize_checkpoint(folder, tmp_path / "out")
    after = tensors_of(tmp_path / "out")
    assert after["l.norm.weight"].dtype == torch.bfloat16
    assert {after["l.A_log"].dtype, after["l.dt_bias"].dtype} == {torch.float32}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["dtype"], config["text_config"]["dtype"]) == ("bfloat16", "bfloat16")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_float32_tensor_in_a_16_bit_source_stays(tmp_path: Path, dtype: str) -> None:
    folder = small(tmp_path / "in", {"text_config": {"dtype": dtype}}, **{"l.norm.weight": torch.ones(4)})
    quantize_checkpoint(folder, tmp_path / "out")
    assert tensors_of(tmp_path / "out")["l.norm.weight"].dtype == torch.float32


def test_a_layer_whose_columns_do_not_fill_blocks_stays_and_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = small(tmp_path / "in", **{"model.layers.0.mlp.down_proj.weight": torch.ones(32, 24)})
    with caplog.at_level(logging.WARNING, "dalsegno.weights"):
        report = quantize_checkpoint(folder, tmp_path / "out")
    assert report.kept == ("model.layers.0.mlp.down_proj",)
    assert "model.layers.0.mlp.down_proj" in caplog.text
    with open_checkpoint(tmp_path / "out") as checkpoint:
        assert isinstance(checkpoint.linear("model.layers.0.mlp.down_proj", 32, 24), DenseWeight)


def test_a_large_result_is_written_in_shards_with_an_index(
    source: Path, quantized: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = 40_000
    monkeypatch.setattr(quantize, "_MAX_SHARD_BYTES", limit)
    quantize_checkpoint(source, tmp_path / "out")
    files = sorted((tmp_path / "out").glob("model-*.safetensors"))
    assert len(files) > 2
    assert all(sum(tensor.nbytes for tensor in load_file(file).values()) <= limit for file in files)
    with open_checkpoint(tmp_path / "out") as checkpoint:
        whole = tensors_of(quantized)
        assert set(checkpoint.names()) == whole.keys()
        for name in checkpoint.names():
            entry = checkpoint.entry(name)
            assert entry is not None
            assert torch.equal(checkpoint.take(entry).float(), whole[name].float())


def test_progress_is_told_in_source_bytes(source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "dalsegno.progress"):
        report = quantize_checkpoint(source, tmp_path / "out")
    assert f"{report.source_bytes} of {report.source_bytes} bytes (100 %)" in caplog.text


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (KeyboardInterrupt(), KeyboardInterrupt),
        (OSError(28, "No space left on device"), WeightsError),
        (RuntimeError("anything"), RuntimeError),
    ],
)
def test_an_interruption_leaves_nothing_behind(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, raised: type[BaseException]
) -> None:
    def fail_after_writing(tensors: dict[str, torch.Tensor], file: Path, metadata: dict[str, str]) -> None:
        save_file(tensors, file, metadata)
        raise error

    monkeypatch.setattr(quantize, "save_file", fail_after_writing)
    with pytest.raises(raised):
        quantize_checkpoint(source, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_run_left_is_tidied_up_and_a_living_one_is_left_alone(source: Path, tmp_path: Path) -> None:
    dead, alive, other = tmp_path / ".out.partial-4194305", tmp_path / ".out.partial-1", tmp_path / ".out.partial-mine"
    for folder in (dead, alive, other):
        folder.mkdir()
    quantize_checkpoint(source, tmp_path / "out")
    assert {folder.name for folder in tmp_path.iterdir()} == {"out", alive.name, other.name}


def test_an_empty_destination_is_filled(source: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    quantize_checkpoint(source, tmp_path / "out")
    assert [folder.name for folder in tmp_path.iterdir()] == ["out"]


def test_a_destination_whose_parents_do_not_exist_is_made(source: Path, tmp_path: Path) -> None:
    quantize_checkpoint(source, tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b" / "config.json").is_file()


def test_too_little_disk_is_said_before_starting(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10, 9, 1000))
    with pytest.raises(WeightsError, match=r"needs 67,\d{3},\d{3} bytes of disk, but 1,000 are free"):
        quantize_checkpoint(source, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "compressed-tensors": (
        lambda d: write_published("llm-compressor", d),
        r"already quantised \(compressed-tensors nvfp4-pack-quantized\)",
    ),
    "modelopt": (
        lambda d: write_published("modelopt mixed w4a16", d),
        r"already quantised \(modelopt MIXED_PRECISION\)",
    ),
    "quantised, says nothing": (
        lambda d: tiny.write_folder(d, {}, tiny.fp8_tensors("a", torch.ones(4, 32)), shards=1),
        "already quantised: tensor a.weight is F8_E4M3",
    ),
    "no such layers": (
        lambda d: tiny.write_folder(d, {}, {"a.weight": torch.ones(4, 32)}, shards=1),
        "no layer to quantise; expected weights of layers named q_proj",
    ),
    "not a number": (
        lambda d: small(d, **{"model.layers.0.mlp.gate_proj.weight": torch.full((4, 32), torch.nan)}),
        r"model\.layers\.0\.mlp\.gate_proj\.weight: an element is infinite or not a number",
    ),
    "no config": (lambda d: (small(d), (d / "config.json").unlink()), r"config\.json: cannot be read"),
    "no folder": (lambda d: None, "expected a folder in Hugging Face layout"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_source_that_cannot_be_quantised_is_refused_and_nothing_is_written(tmp_path: Path, case: str) -> None:
    prepare, message = REFUSED[case]
    prepare(tmp_path / "in")
    with pytest.raises(WeightsError, match=message):
        quantize_checkpoint(tmp_path / "in", tmp_path / "out")
    assert {folder.name for folder in tmp_path.iterdir()} <= {"in"}


@pytest.mark.parametrize("make", [lambda p: (p.mkdir(), (p / "x").touch()), lambda p: p.touch()])
def test_a_destination_that_is_taken_is_refused(source: Path, tmp_path: Path, make: Callable[[Path], object]) -> None:
    make(tmp_path / "out")
    with pytest.raises(WeightsError, match="exists and is not an empty folder"):
        quantize_checkpoint(source, tmp_path / "out")


def test_a_source_is_not_overwritten_by_itself(source: Path) -> None:
    with pytest.raises(WeightsError, match="exists and is not an empty folder"):
        quantize_checkpoint(source, source)
