"""Linear layers of every weight format, alone and stacked, and the small kernels beside them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from engine.kernels.torch import TorchKernels
from engine.weights.formats import DenseWeight, Fp8Weight, Nvfp4Weight
from engine.weights.nvfp4 import dequantize_nvfp4, quantize_nvfp4

IN = 48


def dense(rows, dtype=torch.float32, bias=False):
    weight = torch.randn(rows, IN).to(dtype)
    b = torch.randn(rows).to(dtype) if bias else None
    return DenseWeight(weight, b), weight.float(), torch.zeros(rows) if b is None else b.float()


def fp8(rows, *, per_channel):
    weight = torch.randn(rows, IN).to(torch.float8_e4m3fn)
    scale = torch.rand(rows) + 0.5 if per_channel else torch.tensor(0.25)
    matrix = weight.float() * (scale[:, None] if per_channel else scale)
    return Fp8Weight(weight, scale), matrix, torch.zeros(rows)


def nvfp4(rows):
    quantized = quantize_nvfp4(torch.randn(rows, IN))
    assert isinstance(quantized, Nvfp4Weight)
    return quantized, dequantize_nvfp4(quantized), torch.zeros(rows)


SHARDS = {
    "float32": lambda: [dense(40)],
    "bfloat16 with bias": lambda: [dense(40, torch.bfloat16, bias=True)],
    "float16": lambda: [dense(40, torch.float16)],
    "fp8 per tensor": lambda: [fp8(40, per_channel=False)],
    "fp8 per channel": lambda: [fp8(40, per_channel=True)],
    "nvfp4": lambda: [nvfp4(40)],
    "mixed": lambda: [nvfp4(16), fp8(7, per_channel=True), dense(3, bias=True), nvfp4(32)],
}


@pytest.mark.parametrize("rows", [1, 2, 33])
@pytest.mark.parametrize("name", SHARDS)
def test_linear_multiplies_by_the_dequantised_rows_in_order(name, rows):
    kernels = TorchKernels()
    shards, matrices, biases = zip(*SHARDS[name](), strict=True)
    layer = kernels.prepare_linear(shards)
    x = torch.randn(rows, IN)
    expected = x.double() @ torch.cat(matrices).double().t() + torch.cat(biases).double()
    torch.testing.assert_close(kernels.linear(x, layer).double(), expected, atol=1e-4, rtol=1e-5)
    assert (layer.out_features, layer.in_features) == (sum(len(m) for m in matrices), IN)


def test_linear_takes_rows_that_do_not_lie_together():
    kernels = TorchKernels()
    shard, matrix, _ = dense(40)
    x = torch.randn(5, 3 * IN)[:, IN : 2 * IN]
    torch.testing.assert_close(kernels.linear(x, kernels.prepare_linear([shard])), x @ matrix.t(), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_compute_too(dtype):
    kernels = TorchKernels(dtype=dtype)
    shard, matrix, _ = dense(40)
    x = torch.randn(4, IN).to(dtype)
    out = kernels.linear(x, kernels.prepare_linear([shard]))
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), x.float() @ matrix.t(), atol=0.1, rtol=0.05)


def test_shards_of_different_inputs_are_refused():
    with pytest.raises(ValueError, match="in-features"):
        TorchKernels().prepare_linear([DenseWeight(torch.zeros(2, 16)), DenseWeight(torch.zeros(2, 32))])


def test_norms_follow_their_formulas():
    kernels = TorchKernels()
    x, residual, gate, weight = torch.randn(6, 4, 32), torch.randn(6, 4, 32), torch.randn(6, 4, 32), torch.randn(32)

    def norm(y):
        return y.double() / (y.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()

    torch.testing.assert_close(kernels.rms_norm(x, weight, 1e-5).double(), norm(x), atol=1e-5, rtol=1e-5)
    gated = kernels.gated_rms_norm(x, gate, weight, 1e-5)
    torch.testing.assert_close(gated.double(), norm(x) * F.silu(gate.double()), atol=1e-5, rtol=1e-5)
    summed = x + residual
    out = kernels.fused_add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(residual, summed)
    torch.testing.assert_close(out.double(), norm(summed), atol=1e-5, rtol=1e-5)


def test_silu_and_mul_gates_the_right_half_by_the_left():
    x = torch.randn(5, 20)
    torch.testing.assert_close(TorchKernels().silu_and_mul(x), F.silu(x[:, :10]) * x[:, 10:])
