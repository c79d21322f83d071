"""What the check of a CUDA machine counts and compares besides kernels: rooflines, answers, and what compiles."""

from __future__ import annotations

import io
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from bench.gpu import build
from bench.gpu.demo import CHATS, Answer, Departure, compare_answers, judge_departures, run_demo
from bench.gpu.layers import random_stack
from bench.gpu.report import Report, figure_of
from bench.gpu.roofline import Peaks, step_bytes, step_operations
from bench.gpu.shapes import HYBRID_27B, PERIOD, TINY
from engine.kernels.torch import TorchKernels
from engine.request import TokenLogprob

MIB = 2**20
WEIGHTS = 1_521_909_760
"""Of a period: 3 * (16,480 * 5,120 + 5,120 * 6,144 + 3 * 5,120 * 17,408) + 14,336 * 5,120 and the like."""


def a_period() -> SimpleNamespace:
    """Of the 27B shape in bf16, without its tensors."""
    return SimpleNamespace(
        config=replace(HYBRID_27B, layer_kinds=PERIOD),
        kernels=SimpleNamespace(dtype=torch.bfloat16),
        linear_bytes=2 * WEIGHTS,
        linear_weights=WEIGHTS,
    )


def test_the_large_shape_is_the_published_one():
    image = HYBRID_27B.state_image_bytes(2)
    assert round(image / MIB) == 147
    assert HYBRID_27B.kv_bytes_per_token(2) == 65_536
    assert 16 * WEIGHTS + 2 * HYBRID_27B.vocab_size * HYBRID_27B.hidden_size == 26_893_352_960


def test_a_decode_step_reads_its_weights_its_context_and_its_states_and_writes_these():
    keys_and_values = 2 * 4096 * 4096
    states = 2 * 2 * 3 * (48 * 128 * 128 * 4 + 10_240 * 3 * 2)
    assert step_bytes(a_period(), 1, 4095, 2) == 2 * WEIGHTS + keys_and_values + states


def test_a_prefill_multiplies_its_weights_the_pairs_below_the_diagonal_and_its_states():
    pairs = 2048 * 1000 + 2048 * 2049 / 2
    attention = 4 * 24 * 256 * pairs
    states = 6 * 48 * 128 * 128 * 2048 * 3
    assert step_operations(a_period(), 2048, 1000, 1) == 2 * WEIGHTS * 2048 + attention + states


def test_the_roofline_is_whichever_takes_longer():
    peaks = Peaks(bytes_per_second=100.0, operations_per_second=1000.0)
    assert (peaks.seconds(50, 100), peaks.seconds(50, 900)) == (0.5, 0.9)


@pytest.mark.parametrize("format_name", ["nvfp4", "fp8", "bf16"])
def test_a_random_stack_has_the_weights_of_its_config_and_keeps_activations_in_range(format_name):
    kernels = TorchKernels(torch.float32)
    stack = random_stack(TINY, kernels, format_name, max_tokens=16)
    hidden, inner, heads, gdn = TINY.hidden_size, TINY.intermediate_size, TINY.attention, TINY.gated_delta_net
    q, kv = heads.num_q_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim
    mixers = 3 * (gdn.conv_dim + 2 * gdn.value_dim + 2 * gdn.num_v_heads) + (3 * q + 2 * kv)
    assert stack.linear_weights == hidden * (mixers + 4 * 3 * inner)
    for layer in stack.weights.layers:
        x = torch.randn(64, inner)
        assert 0.3 < float(kernels.linear(x, layer.mlp.down).std()) < 3.0


def test_quartiles_and_shares_of_the_roofline():
    figure = figure_of("speed", "a step", "ms", [4.0, 1.0, 2.0, 3.0, 5.0], bound=1.5)
    assert (figure.low, figure.median, figure.high, figure.samples) == (2.0, 3.0, 4.0, 5)
    console = Console(width=120, file=io.StringIO())
    report = Report(1, console)
    report.measured(figure)
    report.print_tables()
    assert "50 %" in console.file.getvalue()


def answer(*tokens: tuple[int, float, dict[int, float]], source: dict[str, int] | None = None) -> Answer:
    found = tuple(TokenLogprob(token, logprob, tuple(top.items())) for token, logprob, top in tokens)
    return Answer(found, source or {})


COLD = answer((5, -0.1, {5: -0.1, 6: -3.0}), (7, -0.70, {7: -0.70, 8: -0.75}))


@pytest.mark.parametrize(
    ("found", "tier", "is_right"),
    [
        (COLD, None, True),
        (answer((5, -0.1, {}), (8, -0.7, {})), None, True),
        (answer((6, -0.1, {}), (7, -0.7, {})), None, False),
        (answer((5, -0.1, {}), (9, -0.7, {})), None, False),
        (answer((5, -0.1, {})), None, False),
        (COLD, "host", False),
        (replace(COLD, source={"host": 30}), "host", True),
    ],
    ids=[
        "equal",
        "parts at a tie",
        "parts where it was sure",
        "a token of no rank",
        "too short",
        "not reused",
        "reused",
    ],
)
def test_answers_may_part_only_where_two_tokens_are_tied(found, tier, is_right):
    assert compare_answers("a", "b", COLD, found, tier).is_right is is_right


@pytest.mark.parametrize(
    ("departures", "is_right"),
    [
        ((), True),
        ((Departure(1, 8),), True),
        ((Departure(0, 6),), False),
        ((Departure(0, 9), Departure(1, 8)), False),
    ],
    ids=["none", "at a tie", "where it was sure", "to a token of no rank"],
)
def test_an_engine_that_is_led_may_depart_only_at_ties(departures, is_right):
    assert judge_departures("a chat", COLD, departures).is_right is is_right


def test_the_bundled_model_says_the_same_cold_hit_restored_and_in_a_batch():
    report = Report(1, Console(quiet=True))
    run_demo("torch", report, CHATS[1:2])
    assert report.is_right
    assert [each.what for each in report.comparisons] == [
        "same tokens as the CPU",
        "hit equals cold",
        "batch equals alone",
        "restore equals cold",
    ]


def test_without_nvcc_the_build_says_so_and_is_no_failure(monkeypatch, capsys):
    monkeypatch.setenv("PATH", "")
    assert build.main([]) == 0
    assert "skipped: there is no nvcc" in capsys.readouterr().out


@pytest.mark.parametrize("architecture", ["9.0a", "12.0f"])
def test_every_module_that_is_listed_can_be_made(architecture):
    made = {module.name for module in build.modules(architecture)}
    assert made == {name for name, _ in build.catalog(architecture)}
    assert {"append", "rope", "norm", "sampling", "prefill_fa2_fp8_256", "prefill_fa2_bf16_128"} <= made


COMPILE = """
from bench.gpu.triton_build import compile_call
(decode,) = compile_call("w4a16, one row", 120)
(prefill,) = compile_call("w4a16, 2048 rows", 90)
assert ".target sm_120" in decode.ptx and "mma.sync" in decode.ptx, decode.ptx
assert ".target sm_90" in prefill.ptx and "wgmma" in prefill.ptx, prefill.ptx
for name in ("conv, decodes", "conv, prefill", "gated norm"):
    assert compile_call(name, 90)
"""


def test_our_triton_kernels_compile_for_gpus_that_are_not_here(tmp_path):
    """To machine code for their tensor cores. In a process of its own: others run the kernel in the interpreter."""
    environment = {"PATH": "/usr/bin:/bin", "TRITON_CACHE_DIR": str(tmp_path), "HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
