"""Which class serves which weights on which GPU, and what it says about it."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch
from flashinfer.gemm import bmm_fp8, mm_bf16_fp4, mm_fp4

from engine.errors import InsufficientMemoryError, WeightsError
from engine.kernels.device import CPU, DeviceTraits
from engine.kernels.linear.nvfp4_flashinfer import W4A4_BACKENDS, W4A16_BACKENDS
from engine.weights.formats import DenseWeight
from tests.engine.kernels.linear.library import LinearLibrary
from tests.engine.kernels.linear.samples import (
    SM80,
    SM89,
    SM90,
    SM100,
    SM103,
    SM120,
    SM121,
    dense,
    fp8,
    make_room,
    nvfp4,
)

W4A4, W4A4_BY_ROW = "nvfp4 w4a4 (flashinfer mm_fp4)", "nvfp4 w4a4 (flashinfer mm_fp4, activations scaled by row)"
W4A16, UNPACKED = "nvfp4 w4a16 (flashinfer mm_bf16_fp4)", "nvfp4 dequantised to bf16"
FP8, FP8_BY_ROW = "fp8 w8a8 (flashinfer bmm_fp8)", "fp8 w8a8 (flashinfer bmm_fp8, activations scaled by row)"
FP8_UNPACKED = "fp8 dequantised to bf16"


def with_scale():
    return nvfp4(128, input_scale=1e-3)


def without_scale():
    return nvfp4(128)


def narrow():
    return nvfp4(48, input_scale=1e-3)


def fp8_with_scale():
    return fp8(128, input_scale=0.01)


def fp8_without_scale():
    return fp8(128)


@pytest.mark.parametrize(
    ("traits", "make", "activations", "kind"),
    [
        (SM100, with_scale, "auto", W4A4),
        (SM103, with_scale, "auto", W4A4),
        (SM120, with_scale, "auto", W4A4),
        (SM121, with_scale, "fp4", W4A4),
        (SM100, with_scale, "bf16", W4A16),
        (SM120, with_scale, "bf16", UNPACKED),
        (SM100, without_scale, "auto", W4A16),
        (SM103, without_scale, "auto", W4A16),
        (SM121, without_scale, "auto", UNPACKED),
        (SM100, without_scale, "fp4", W4A4_BY_ROW),
        (SM120, narrow, "auto", UNPACKED),
        (SM100, narrow, "auto", UNPACKED),
        (SM90, with_scale, "fp4", UNPACKED),
        (SM80, with_scale, "auto", UNPACKED),
        (CPU, with_scale, "auto", UNPACKED),
        (SM90, fp8_with_scale, "auto", FP8),
        (SM120, fp8_with_scale, "fp4", FP8),
        (SM89, fp8_without_scale, "auto", FP8_BY_ROW),
        (SM90, fp8_with_scale, "bf16", FP8_UNPACKED),
        (SM80, fp8_with_scale, "auto", FP8_UNPACKED),
        (CPU, fp8_with_scale, "auto", FP8_UNPACKED),
        (SM80, lambda: dense(8), "auto", "dense"),
    ],
    ids=lambda value: value.name if isinstance(value, DeviceTraits) else getattr(value, "__name__", None),
)
def test_weights_are_served_by_the_first_class_that_can(traits, make, activations, kind):
    """On this CPU Triton has no GPU to run on, so its place is taken by the last resort."""
    assert make_room(traits, activations).prepare([make()]).kind == kind


def test_the_architectures_are_those_that_flashinfer_serves():
    for (major, minor), backend in W4A4_BACKENDS.items():
        assert mm_fp4.is_backend_supported(backend if backend != "auto" else "b12x", 10 * major + minor)
    for (major, minor), backend in W4A16_BACKENDS.items():
        assert mm_bf16_fp4.is_backend_supported(backend, 10 * major + minor)
    for number in (89, 90, 100, 103, 120, 121):
        assert bmm_fp8.is_backend_supported("cublas", number)


@pytest.mark.parametrize(
    ("name", "make", "kind"), [("mm_fp4", with_scale, W4A16), ("bmm_fp8", fp8_with_scale, FP8_UNPACKED)]
)
def test_a_flashinfer_that_denies_an_architecture_is_believed(name, make, kind):
    library = LinearLibrary()
    function = getattr(library, name)

    def denying(**arguments):
        return function(**arguments)

    denying.is_compute_capability_supported = lambda number: False
    denying.is_backend_supported = lambda backend, number: False
    setattr(library, name, denying)
    assert make_room(SM100, library=library).prepare([make()]).kind == kind


def raises(**arguments):
    raise OSError("no nvcc here")


def doubles(**arguments):
    return 2 * LinearLibrary().mm_fp4(**arguments)


def forgets_the_last_row(**arguments):
    out = LinearLibrary().mm_fp4(**arguments)
    if len(out) > 1:
        out[-1] = torch.nan
    return out


@pytest.mark.parametrize(
    ("broken", "fault"),
    [
        (raises, "OSError: no nvcc here"),
        (doubles, "results are wrong"),
        (forgets_the_last_row, "a relative error of nan for 5 rows"),
    ],
)
def test_a_class_that_fails_its_trial_is_struck_off_and_named(broken, fault, caplog):
    library = LinearLibrary()
    library.mm_fp4 = broken
    room = make_room(SM100, library=library)
    with caplog.at_level(logging.INFO, logger="dalsegno.kernels"):
        kinds = [room.prepare([with_scale()]).kind for _ in range(2)]
    assert kinds == [W4A16, W4A16]
    assert sum(fault in record.message for record in caplog.records if record.levelno == logging.WARNING) == 1
    assert fault in room.census()[0].reason


@pytest.mark.parametrize("make", [with_scale, without_scale, fp8_with_scale])
def test_a_bias_far_above_the_product_does_not_fail_the_trial(make):
    shard = make()
    biased = replace(shard, bias=torch.full((shard.out_features,), 1000.3))
    room = make_room(SM100)
    assert room.prepare([biased]).kind == make_room(SM100).prepare([shard]).kind
    assert room.census()[0].reason in ("", "the checkpoint has no scale for activations")


def test_float32_kernels_unpack_quantised_weights():
    room = make_room(SM100, dtype=torch.float32)
    assert room.prepare([with_scale()]).kind == "nvfp4 dequantised to float32"
    assert "answers in bf16" in room.census()[0].reason


def names(layer, *ends):
    return [f"model.layers.{layer}.{end}" for end in ends]


def test_the_census_folds_layers_and_says_what_serves_them_and_why():
    room = make_room(SM100)
    for layer in (0, 1, 12):
        first, second = names(layer, "mlp.gate_proj", "mlp.up_proj")
        room.prepare([nvfp4(128, input_scale=1e-3, name=first), nvfp4(128, input_scale=1e-3, name=second)])
        qkv, b = names(layer, "linear_attn.in_proj_qkv", "linear_attn.in_proj_b")
        room.prepare([nvfp4(256, name=qkv), dense(8, name=b)])
    room.prepare([dense(8, name="lm_head")])
    lines = [(line.layers, line.kind, line.count, line.reason) for line in room.census()]
    assert lines == [
        ("model.layers.*.mlp.gate_proj+up_proj", W4A4, 3, ""),
        ("model.layers.*.linear_attn.in_proj_qkv", W4A16, 3, "the checkpoint has no scale for activations"),
        ("model.layers.*.linear_attn.in_proj_b", "dense", 3, ""),
        ("lm_head", "dense", 1, ""),
    ]
    assert str(room.census()[0]).startswith(f"model.layers.*.mlp.gate_proj+up_proj: {W4A4} x 3, ")
    assert {(choice.kernel, choice.implementation) for choice in room.choices()} == {
        ("linear (nvfp4)", W4A4),
        ("linear (nvfp4)", W4A16),
        ("linear (dense)", "dense"),
    }


def test_a_fallback_is_logged_once(caplog):
    room = make_room(SM90)
    with caplog.at_level(logging.INFO, logger="dalsegno.kernels"):
        for _ in range(3):
            room.prepare([with_scale()])
    assert len(caplog.records) == 1
    assert caplog.records[0].levelno == logging.WARNING
    assert "mm_fp4 has no kernel for sm90" in caplog.records[0].message


def test_bytes_are_those_of_the_prepared_tensors():
    room = make_room(SM120)
    layer = room.prepare([nvfp4(224, 160, bias=True, input_scale=0.01)])
    # 4 bits each, scales filled up to 256 rows of 12, a bias in bf16.
    assert layer.nbytes == room.nbytes == 224 * 160 // 2 + 256 * 12 + 224 * 2


def test_unpacking_more_than_the_device_holds_is_refused():
    small = DeviceTraits("small", (7, 5), total_bytes=100_000)
    room = make_room(small)
    room.prepare([nvfp4(256, name="model.layers.0.q_proj")])
    with pytest.raises(
        InsufficientMemoryError, match=r"layers\.\*\.q_proj.*no kernel for sm75.*needs 65,536 .* 34,464"
    ):
        room.prepare([nvfp4(256, name="model.layers.1.q_proj")])


def test_shards_of_different_inputs_are_refused():
    with pytest.raises(ValueError, match=r"in-features are \[16, 32\]"):
        make_room().prepare([DenseWeight(torch.zeros(2, 16)), DenseWeight(torch.zeros(2, 32))])


@pytest.mark.parametrize("scale", [0.0, float("inf"), float("nan")])
def test_a_scale_that_cannot_be_divided_by_names_its_layer(scale):
    with pytest.raises(WeightsError, match="q_proj: its input scale"):
        make_room(SM100).prepare([nvfp4(128, input_scale=scale, name="q_proj")])
