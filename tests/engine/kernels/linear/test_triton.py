"""The Triton kernel: its results in Triton's interpreter, and its compilation for each GPU that it may meet."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from engine.kernels.device import DeviceTraits
from engine.kernels.linear.nvfp4_triton import Nvfp4Triton
from tests.engine.kernels.linear.samples import SM80, SM90, SM120, dense, nvfp4

TRUNCATED = 2.0**-7
"""The interpreter cuts a float32 off to bfloat16, where a GPU rounds to nearest: up to one unit of its last place."""


@pytest.fixture(scope="module")
def interpreted():
    """What interpreted.py found, in a process in which Triton interprets."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": "."}
    command = [sys.executable, "-W", "ignore", "-m", "tests.engine.kernels.linear.interpreted"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_products_of_any_shape_agree_with_float64(interpreted):
    assert len(interpreted["shapes"]) >= 20
    assert {shape: error for shape, error in interpreted["shapes"].items() if not error < TRUNCATED} == {}


def test_fused_shards_of_unequal_scales_share_one_exact_product(interpreted):
    room = interpreted["room"]
    assert room["kind"] == "nvfp4 w4a16 (triton) + dense"
    assert room["products"] == 3
    assert room["error"] < TRUNCATED
    assert room["fused equals unfused"]
    # 73 rows of 128 columns: codes, scales, a float32 for each row, a bias in bf16.
    assert room["nbytes"] == 73 * (64 + 8 + 4 + 2)


def test_rows_apart_are_read_in_place_and_none_are_no_work(interpreted):
    assert interpreted["room"]["strided equals dense"]
    assert interpreted["room"]["no rows"] == [0, 124]


def test_a_decodes_row_has_the_same_bits_in_every_batch(interpreted):
    assert interpreted["batch"] == {"0": True, "7": True, "15": True}


@pytest.mark.parametrize(
    ("traits", "device", "shard", "dtype", "reason"),
    [
        (SM80, "cuda", nvfp4(8), torch.bfloat16, ""),
        (SM90, "cuda", nvfp4(8), torch.bfloat16, ""),
        (SM120, "cuda", nvfp4(8), torch.bfloat16, ""),
        (DeviceTraits("T4", (7, 5)), "cuda", nvfp4(8), torch.bfloat16, "needs sm80 or newer, not sm75"),
        (SM90, "cpu", nvfp4(8), torch.bfloat16, "needs a GPU"),
        (SM90, "cuda", nvfp4(8), torch.float16, "in bf16, not float16"),
        (SM90, "cuda", dense(8), torch.bfloat16, "NVFP4 weights only"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_it_serves_nvfp4_on_gpus_with_bf16_tensor_cores(traits, device, shard, dtype, reason):
    found = Nvfp4Triton(torch.device(device), dtype, traits).supports(traits, shard, "auto")
    assert reason in found
    assert bool(found) == bool(reason)


COMPILE = """
import sys
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from engine.kernels.linear.w4a16_kernel import BLOCKINGS, _DOT_DTYPE, _kernel
types = dict.fromkeys(("n", "N", "K", "x_stride", "columns_k"), "i32")
types |= {"x": "*bf16", "packed": "*i32", "scale": "*i32", "row_scale": "*fp32"}
# As Triton finds at run time: addresses, N and K are multiples of 16; n is not asked about.
aligned = {(place,): [["tt.divisibility", 16]] for place in (0, 1, 2, 3, 4, 6, 7, 8, 9)}
for architecture in map(int, sys.argv[1:]):
    for blocking, is_partial in [(BLOCKINGS[0], True), *((blocking, False) for blocking in BLOCKINGS)]:
        constants = {"IS_PARTIAL": is_partial, "IS_ALIGNED": True, "DOT_DTYPE": _DOT_DTYPE, **blocking.constants}
        signature = {name: types.get(name, "constexpr") for name in _kernel.arg_names}
        signature["out"] = "*fp32" if is_partial else "*bf16"
        options = {"num_warps": blocking.num_warps, "num_stages": blocking.num_stages}
        source = ASTSource(_kernel, signature, constants, aligned)
        built = compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
        assert "mma" in built.asm["ptx"] and len(built.asm["cubin"]), built.metadata
        assert ".ftz" not in built.asm["ptx"], "subnormal numbers are flushed to 0: every 1/2 among the codes"
        assert built.metadata.shared <= 99 * 1024, built.metadata
        print(architecture, blocking.rows, is_partial)
"""


@pytest.mark.parametrize(
    "architectures",
    [["80"], pytest.param(["86", "89", "90", "100", "103", "120", "121"], marks=pytest.mark.slow)],
    ids=lambda architectures: " ".join(architectures),
)
def test_the_kernel_compiles_for(architectures, tmp_path):
    """To machine code, by the ptxas that comes with Triton: the products are tensor core instructions, and shared
    memory suffices on every GPU (99 KiB on SM86, SM89 and SM12x)."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": ".", "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-W", "ignore", "-c", COMPILE, *architectures]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 4 * len(architectures)
