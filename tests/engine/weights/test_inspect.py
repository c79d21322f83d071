from pathlib import Path

import pytest
import torch

from engine.errors import WeightsError
from engine.weights.inspect import FP8, NVFP4_COMPRESSED_TENSORS, NVFP4_MODELOPT, inspect_checkpoint
from tests.engine.weights import tiny_checkpoints as tiny
from tests.engine.weights.published import write_published


def test_each_format_is_summed_up_with_its_scales(tmp_path: Path) -> None:
    weight = torch.ones(8, 32)
    tensors = (
        tiny.fp8_tensors("a", weight, per_channel=True)
        | tiny.modelopt_nvfp4_tensors("b", weight)
        | tiny.compressed_nvfp4_tensors("c", weight)
        | {"d.weight": weight.bfloat16(), "e.A_log": torch.ones(3), "f": torch.zeros(2, dtype=torch.int32)}
    )
    tiny.write_folder(tmp_path, {}, tensors, shards=1)
    formats = {part.name: (part.tensors, part.parameters, part.nbytes) for part in inspect_checkpoint(tmp_path).formats}
    assert formats == {
        FP8: (1, 256, 256 + 32),
        NVFP4_MODELOPT: (1, 256, 128 + 16 + 4),
        NVFP4_COMPRESSED_TENSORS: (1, 256, 128 + 16 + 4),
        "bfloat16": (1, 256, 512),
        "float32": (1, 3, 12),
        "I32": (1, 2, 8),
    }


def test_the_largest_format_comes_first(tmp_path: Path) -> None:
    write_published("bf16 3.8", tmp_path)
    assert inspect_checkpoint(tmp_path).formats[0].name == "bfloat16"


def test_quantising_does_not_change_the_number_of_parameters(tmp_path: Path) -> None:
    write_published("bf16 3.8", tmp_path / "plain")
    write_published("modelopt mixed with kv scales", tmp_path / "mixed")
    plain, mixed = inspect_checkpoint(tmp_path / "plain"), inspect_checkpoint(tmp_path / "mixed")
    assert mixed.parameters == plain.parameters
    assert mixed.nbytes < plain.nbytes


def test_shards_and_the_checkpoints_own_statement_are_told(tmp_path: Path) -> None:
    write_published("modelopt mixed w4a16", tmp_path)
    summary = inspect_checkpoint(tmp_path)
    assert [name for name, _ in summary.shards] == [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    assert sum(nbytes for _, nbytes in summary.shards) > summary.nbytes
    assert summary.quantization is not None
    assert summary.quantization.algorithm == "MIXED_PRECISION"
    assert summary.quantization.producer == "modelopt 0.45.0"
    assert summary.quantization.kv_cache == "FP8"


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"no model\.safetensors"):
        inspect_checkpoint(tmp_path)
