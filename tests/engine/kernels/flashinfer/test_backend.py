"""The backend's alternatives compute what flashinfer would, and what does not fit together is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.kernels.device import CPU, DeviceTraits
from engine.models.config import RopeConfig
from engine.step_memory import ATTENTION_WORKSPACE_BYTES, INDEX_WORKSPACE_BYTES
from tests.engine.kernels.flashinfer.checks import CHECKS, FP8
from tests.engine.kernels.flashinfer.rig import CASES, CONFIG, PAGES, STATE_CASES, kv_pages, make_rig
from tests.engine.kernels.layouts import make_layout

A100 = DeviceTraits("an A100", (8, 0))
THOR = DeviceTraits("a Thor", (11, 0))
DECODE, CHUNKS = "gated_delta_rule_decode_pretranspose", "chunk_gated_delta_rule"

ALTERNATIVES = {
    # traits, config, checks that must hold, functions of flashinfer that must not be called
    "decodes as chunks before SM90": (A100, CONFIG, ("gated_delta_rule", "causal_conv"), (DECODE,)),
    "chunks by torch where flashinfer has none": (THOR, CONFIG, ("gated_delta_rule",), (CHUNKS,)),
    "rotated dims that flashinfer cannot read": (
        A100,
        replace(CONFIG, rope=RopeConfig(theta=1e4, rotary_dim=24)),
        ("rope",),
        ("apply_rope_with_cos_sin_cache_inplace",),
    ),
    "no GPU": (
        CPU,
        CONFIG,
        ("rms_norm", "fused_add_rms_norm", "gated_rms_norm", "silu_and_mul", "rope", "attention", "gated_delta_rule"),
        ("rmsnorm", "fused_add_rmsnorm", "silu_and_mul", "append_paged_kv_cache", DECODE, CHUNKS),
    ),
}


@pytest.mark.parametrize("case", ALTERNATIVES)
def test_an_alternative_computes_the_same(case):
    traits, config, checks, unused = ALTERNATIVES[case]
    rig = make_rig(traits=traits, config=config)
    for check in checks:
        CHECKS[check](rig)
    assert [name for name in unused if rig.library.called(name)] == []


def test_a_step_of_decodes_goes_to_flashinfer_where_only_its_chunks_are_missing():
    rig = make_rig(traits=THOR)
    CHECKS["gated_delta_rule_of_decodes"](rig)
    assert len(rig.library.called(DECODE)) == 1


def test_decodes_as_chunks_have_fixed_buffers_too():
    rig = make_rig(traits=A100)
    CHECKS["decodes_in_buffers"](rig)
    assert rig.library.called(CHUNKS)


def test_the_workspace_is_what_the_memory_plan_sets_aside():
    kernels = make_rig().kernels
    assert kernels.workspace_bytes == ATTENTION_WORKSPACE_BYTES + 2 * INDEX_WORKSPACE_BYTES
    kernels.prepare_decodes(3, PAGES)
    assert kernels.workspace_bytes == ATTENTION_WORKSPACE_BYTES + 5 * INDEX_WORKSPACE_BYTES


@pytest.mark.parametrize(("new_tokens", "wrapper"), [([1, 1, 1], "Decode"), ([5], "Prefill")])
def test_a_plan_is_made_again_when_the_pages_turn_out_to_be_fp8_and_then_for_fp8(new_tokens, wrapper):
    rig = make_rig()
    layout = make_layout(new_tokens, [9] * len(new_tokens))
    k = v = rig.draw(layout.num_tokens, 2, 128)
    cache = kv_pages(rig, layout).to(FP8)
    for _ in range(2):
        rig.kernels.plan(layout)
        rig.kernels.append_paged_kv(k, v, cache)
    plans = rig.library.called(f"Batch{wrapper}WithPagedKVCacheWrapper.plan")
    assert [plan.arguments["kv_data_type"] for plan in plans] == [torch.bfloat16, FP8, FP8]


def test_more_pages_than_were_set_aside_are_planned_without_the_buffers():
    rig = make_rig()
    rig.kernels.prepare_decodes(3, 4)
    CHECKS["attention_of_decodes"](rig)
    last = rig.library.called("BatchDecodeWithPagedKVCacheWrapper.plan")[-1]
    assert last.arguments["indices"].shape[0] > 4


def test_fewer_pages_than_decodes_cannot_be_set_aside():
    with pytest.raises(ValueError, match="4 decodes have at least as many pages; max_pages is 3"):
        make_rig().kernels.prepare_decodes(4, 3)


def test_kernels_before_the_first_plan_are_refused():
    rig = make_rig()
    with pytest.raises(RuntimeError, match=r"plan\(layout\) must come before"):
        rig.kernels.apply_rope(rig.draw(1, 4, 128), rig.draw(1, 2, 128), torch.zeros(9, 32))


def attend(rig, layout, *, q_heads=4, scale=128**-0.5, dtype=torch.bfloat16, page_size=None, **options):
    cache = kv_pages(rig, replace(layout, page_size=page_size or layout.page_size), **options).to(dtype)
    rig.kernels.paged_attention(rig.draw(layout.num_tokens, q_heads, 128), cache, scale)


def norm(rig, layout, *, weight_dtype=torch.bfloat16, size=256):
    rig.kernels.rms_norm(rig.draw(3, 256), torch.ones(size, dtype=weight_dtype), 1e-6)


def delta(rig, layout, *, states_dtype=torch.float32, a_dtype=torch.bfloat16, A_log_dtype=torch.float32):
    n = layout.num_tokens
    q, k, v, b = rig.draw(n, 1, 128), rig.draw(n, 1, 128), rig.draw(n, 2, 128), rig.draw(n, 2)
    states = torch.zeros(12, 2, 128, 128, dtype=states_dtype)
    A_log = torch.zeros(2, dtype=A_log_dtype)
    rig.kernels.gated_delta_rule(q, k, v, rig.draw(n, 2).to(a_dtype), b, A_log, torch.zeros(2), states)


REFUSALS = {
    "another scale": (attend, {"scale": 0.5}, "planned with the scale 0.088.*, but 0.5"),
    "pages in another dtype": (attend, {"dtype": torch.float16}, "kv_cache is .* of torch.float16"),
    "pages of another size": (attend, {"page_size": 8}, "kv_cache is .*, expected .any, 2, 16, 2, 128"),
    "other query heads": (attend, {"q_heads": 6}, "q is .* expected .*, 4, 128"),
    "a norm's weight in float32": (norm, {"weight_dtype": torch.float32}, "norm weight is .* of torch.float32"),
    "a norm's weight of another size": (norm, {"size": 128}, "norm weight is .128. .*expected .256."),
    "states in bfloat16": (delta, {"states_dtype": torch.bfloat16}, "states is .* of torch.bfloat16"),
    "a in float32": (delta, {"a_dtype": torch.float32}, "a is .* of torch.float32"),
    "A_log in bfloat16": (delta, {"A_log_dtype": torch.bfloat16}, "A_log is .* of torch.bfloat16"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_a_kernel_would_misread_is_refused(case):
    act, options, message = REFUSALS[case]
    rig = make_rig()
    layout = CASES["decodes and prefills"].layout()
    rig.kernels.plan(layout)
    with pytest.raises(ValueError, match=message):
        act(rig, layout, **options)


def test_a_state_of_a_decode_is_captured_in_fixed_buffers_too():
    rig = make_rig()
    rig.kernels.prepare_decodes(3, PAGES)
    assert STATE_CASES["decodes"].captures
    CHECKS["gated_delta_rule_of_decodes"](rig)


def test_only_a_gpus_dtypes_are_taken_on_a_gpu():
    with pytest.raises(ValueError, match=r"not in torch\.float32"):
        type(make_rig().kernels)(torch.device("cuda"), torch.float32, CONFIG, None, A100)
