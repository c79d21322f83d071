"""The library that the contract is checked with: its references against one another, and what it refuses."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from flashinfer.quantization.fp4_quantization import SfLayout
from flashinfer.trace.templates.attention import _gqa_paged_decode_reference, _gqa_paged_prefill_reference
from flashinfer.trace.templates.gdn import _gdn_decode_reference, _gdn_prefill_reference
from flashinfer.trace.templates.gemm import _unswizzle_sf_128x4

from engine.kernels.flashinfer.library import FUNCTIONS
from tests.engine.kernels.flashinfer.contract import ContractError
from tests.engine.kernels.flashinfer.reference_library import ReferenceLibrary

BF16 = torch.bfloat16


@pytest.fixture
def library():
    return ReferenceLibrary()


def random(*shape, dtype=BF16, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def test_it_has_every_name_that_the_backend_may_call(library):
    assert [name for name in FUNCTIONS if not hasattr(library, name)] == []


def paged_plan(**changes):
    tables = {"paged_kv_indptr": int32(0, 2, 3), "paged_kv_indices": int32(5, 1, 3)}
    heads = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim_qk": 64, "page_size": 16}
    return {
        **tables,
        **heads,
        "qo_indptr": int32(0, 7, 8),
        "paged_kv_last_page_len": int32(16, 16),
        "causal": True,
        "q_data_type": BF16,
        **changes,
    }


def decode_plan(**changes):
    tables = {"indptr": int32(0, 2, 3), "indices": int32(5, 1, 3), "last_page_len": int32(16, 16)}
    heads = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 64, "page_size": 16}
    return {**tables, **heads, "q_data_type": BF16, **changes}


def workspace():
    return torch.zeros(1024, dtype=torch.uint8)


def test_attention_over_full_pages_is_that_of_the_wrappers_own_references(library):
    cache, q = random(8, 2, 16, 2, 64), random(8, 4, 64, seed=1)
    prefill = library.BatchPrefillWithPagedKVCacheWrapper(workspace(), "NHD")
    plan = paged_plan()
    prefill.plan(**plan)
    expected, _ = _gqa_paged_prefill_reference(
        q, *cache.unbind(1), plan["qo_indptr"], plan["paged_kv_indptr"], plan["paged_kv_indices"], 64**-0.5
    )
    torch.testing.assert_close(prefill.run(q, cache), expected)
    decode = library.BatchDecodeWithPagedKVCacheWrapper(workspace(), "NHD")
    decode.plan(**decode_plan())
    expected, _ = _gqa_paged_decode_reference(q[:2], *cache.unbind(1), int32(0, 2, 3), int32(5, 1, 3), 64**-0.5)
    torch.testing.assert_close(decode.run(q[:2], cache), expected)


def test_a_graph_wrapper_reads_the_buffers_that_it_was_given(library):
    buffers = {
        "paged_kv_indptr_buffer": int32(9, 9, 9),
        "paged_kv_indices_buffer": torch.full((6,), 9, dtype=torch.int32),
        "paged_kv_last_page_len_buffer": int32(9, 9),
    }
    wrapper = library.BatchDecodeWithPagedKVCacheWrapper(workspace(), "NHD", use_cuda_graph=True, **buffers)
    wrapper.plan(**decode_plan())
    assert buffers["paged_kv_indices_buffer"].tolist() == [5, 1, 3, 9, 9, 9]
    cache, q = random(8, 2, 16, 2, 64), random(2, 4, 64, seed=1)
    before = wrapper.run(q, cache)
    buffers["paged_kv_indices_buffer"][0] = 2
    after = wrapper.run(q, cache)
    assert not torch.equal(before[0], after[0])
    assert torch.equal(before[1], after[1])


def gdn_inputs(tokens, dtype=torch.float32, k_heads=1, v_heads=2):
    q, k = (F.normalize(random(tokens, k_heads, 128, dtype=torch.float32, seed=i), dim=-1).to(dtype) for i in (1, 2))
    return {
        "q": q,
        "k": k,
        "v": random(tokens, v_heads, 128, dtype=dtype, seed=3),
        "g": torch.rand(tokens, v_heads, generator=torch.Generator().manual_seed(4)) * 0.5 + 0.5,
        "beta": torch.rand(tokens, v_heads, generator=torch.Generator().manual_seed(5)),
    }


def test_the_delta_rule_in_pieces_is_that_of_the_whole_reference():
    library = ReferenceLibrary(torch.float32)
    inputs = gdn_inputs(150 + 20)
    pool = random(8, 2, 128, 128, dtype=torch.float32)
    initial = pool[[3, 6]]
    out, _ = library.chunk_gated_delta_rule(
        **inputs,
        initial_state=pool,
        output_state=pool,
        output_final_state=True,
        cu_seqlens=int32(0, 150, 170),
        state_indices=int32(3, 6),
        output_state_indices=int32(4, 6),
        state_checkpoints=pool,
        checkpoint_cu_starts=int32(0, 2, 2),
        checkpoint_every_n_tokens=64,
        checkpoint_state_indices=int32(0, -1),
    )
    # The reference for packed states takes what these gates are computed from.
    a = torch.log(torch.expm1(-torch.log(inputs["g"].double()))).float()
    logits = torch.log(inputs["beta"] / (1 - inputs["beta"]))
    zero = torch.zeros(2)
    arguments = (inputs["q"], inputs["k"], inputs["v"], initial, zero, a, zero, logits)
    expected, states = _gdn_prefill_reference(*arguments, int32(0, 150, 170), None)
    torch.testing.assert_close(out.to(BF16), expected, atol=2e-3, rtol=2e-2)
    torch.testing.assert_close(pool[[4, 6]], states, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(pool[3], initial[0], atol=0, rtol=0)
    first = (*(x[:64] if x.shape[0] == 170 else x for x in arguments[:3]), initial[:1], zero, a[:64], zero, logits[:64])
    _, after_64 = _gdn_prefill_reference(*first, int32(0, 64), None)
    torch.testing.assert_close(pool[:1], after_64, atol=1e-5, rtol=1e-4)


def test_decoding_is_that_of_the_functions_own_reference(library):
    inputs = gdn_inputs(3, BF16)
    q, k, v = (inputs[name][:, None] for name in "qkv")
    a, b, pool = random(3, 1, 2), random(3, 1, 2, seed=9), random(8, 2, 128, 128, dtype=torch.float32)
    A_log, dt_bias = torch.rand(2), torch.rand(2)
    expected, states = _gdn_decode_reference(q, k, v, pool[[5, 1, 2]], A_log, a, dt_bias, b, None)
    gates = {"A_log": A_log, "a": a, "dt_bias": dt_bias, "b": b}
    out, _ = library.gated_delta_rule_decode_pretranspose(
        q, k, v, None, **gates, use_qk_l2norm=False, initial_state=pool, initial_state_indices=int32(5, 1, 2)
    )
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(pool[[5, 1, 2]], states)


@pytest.mark.parametrize("eps", [1e-6, 1e-5, 1e-2])
def test_norms_know_any_epsilon(eps):
    library = ReferenceLibrary(torch.float32)
    x, weight = random(5, 16, dtype=torch.float32) * 1e-2, random(16, dtype=torch.float32, seed=1)
    torch.testing.assert_close(library.rmsnorm(x, weight, eps), F.rms_norm(x, (16,), weight, eps))


def test_the_swizzle_is_what_the_references_undo(library):
    scales = torch.arange(130 * 5).remainder(251).to(torch.uint8).view(130, 5)
    flat = library.nvfp4_block_scale_interleave(scales)
    assert flat.shape == (256 * 8,)
    assert torch.equal(_unswizzle_sf_128x4(flat, 130, 5), scales)


def test_fp4_products_decode_what_was_quantised(library):
    x, weight = random(3, 64), random(128, 64, seed=1)
    quantised = [library.nvfp4_quantize(tensor, torch.tensor([100.0])) for tensor in (x, weight)]
    (a, a_scales), (b, b_scales) = quantised
    alpha = torch.tensor([1e-4])
    out = library.mm_fp4(a, b.t(), a_scales, b_scales.t(), alpha)
    assert float((out.float() - x.float() @ weight.float().t()).norm() / (x.float() @ weight.float().t()).norm()) < 0.2
    linear, _ = library.nvfp4_quantize(x, torch.tensor([100.0]), sfLayout=SfLayout.layout_linear)
    assert torch.equal(linear, a)
    prepared = library.prepare_bf16_fp4_weights(b, b_scales, torch.tensor([0.01]), backend="cudnn")
    by_weights = library.mm_bf16_fp4(x, *prepared, backend="cudnn")
    assert float((by_weights.float() - x.float() @ weight.float().t()).norm() / out.float().norm()) < 0.15


REFUSED = {
    "a parameter that is not there": lambda lib: lib.rmsnorm(random(2, 16), random(16), epsilon=1e-6),
    "a norm of another size": lambda lib: lib.rmsnorm(random(2, 16), random(8), 1e-6),
    "rows that begin between 16 bytes": lambda lib: lib.rmsnorm(random(2, 20)[:, 4:], random(16), 1e-6),
    "activations in float32": lambda lib: lib.rmsnorm(random(2, 16, dtype=torch.float32), random(16), 1e-6),
    "positions in int64 where the kernel takes int32": lambda lib: lib.append_paged_kv_cache(
        random(1, 2, 64), random(1, 2, 64), int32(0), torch.tensor([0]), random(8, 2, 16, 2, 64),
        int32(1), int32(0, 1), int32(1),
    ),
    "keys in bfloat16 for pages in fp8": lambda lib: lib.append_paged_kv_cache(
        random(1, 2, 64), random(1, 2, 64), int32(0), int32(0), random(8, 2, 16, 2, 64).to(torch.float8_e4m3fn),
        int32(1), int32(0, 1), int32(1),
    ),
    "a plan in float16": lambda lib: lib.BatchDecodeWithPagedKVCacheWrapper(workspace()).plan(
        **decode_plan(q_data_type=torch.float16)
    ),
    "a group that the decode has no kernel for": lambda lib: lib.BatchDecodeWithPagedKVCacheWrapper(workspace()).plan(
        **decode_plan(num_qo_heads=10)
    ),
    "heads before tokens": lambda lib: run_decode(lib, random(8, 2, 2, 16, 64)),
    "pages in another dtype than planned": lambda lib: run_decode(lib, random(8, 2, 16, 2, 64).float()),
    "a state that is not float32": lambda lib: prefill(lib, initial_state=random(2, 2, 128, 128)),
    "a state with K before V": lambda lib: prefill(
        lib, initial_state=random(2, 2, 128, 128, dtype=torch.float32).transpose(2, 3)
    ),
    "checkpoints off the grid": lambda lib: prefill(
        lib, checkpoint_every_n_tokens=32, state_checkpoints=torch.zeros(4, 2, 128, 128),
        checkpoint_cu_starts=int32(0, 2),
    ),
    "two sequences that write one row": lambda lib: prefill(
        lib, initial_state=None, output_state=torch.zeros(4, 2, 128, 128), cu_seqlens=int32(0, 40, 70),
        state_indices=int32(1, 1),
    ),
}  # fmt: skip


def run_decode(library, cache):
    wrapper = library.BatchDecodeWithPagedKVCacheWrapper(workspace(), "NHD")
    wrapper.plan(**decode_plan())
    return wrapper.run(random(2, 4, 64), cache)


def prefill(library, **changes):
    arguments = {"output_final_state": True, "cu_seqlens": int32(0, 70), **changes}
    return library.chunk_gated_delta_rule(**gdn_inputs(70, BF16), **arguments)


@pytest.mark.parametrize("case", REFUSED)
def test_it_refuses(library, case):
    with pytest.raises((ContractError, ValueError)):
        REFUSED[case](library)
