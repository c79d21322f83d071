"""Which kernel serves what, on each architecture and for each shape."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.kernels.device import CPU, DeviceTraits
from engine.kernels.flashinfer.support import choose
from engine.models.config import AttentionConfig, GatedDeltaNetConfig, LayerKind, ModelConfig, RopeConfig

HYBRID = ModelConfig(
    architecture="qwen3_5",
    vocab_size=64,
    hidden_size=256,
    intermediate_size=128,
    layer_kinds=(LayerKind.LINEAR_ATTENTION, LayerKind.FULL_ATTENTION),
    attention=AttentionConfig(num_q_heads=4, num_kv_heads=2, head_dim=256),
    gated_delta_net=GatedDeltaNetConfig(
        num_k_heads=1, num_v_heads=2, key_head_dim=128, value_head_dim=128, conv_kernel_size=4
    ),
    rope=RopeConfig(theta=1e4, rotary_dim=64),
    rms_norm_eps=1e-6,
    max_position_embeddings=256,
    has_tied_embeddings=False,
)
PLAIN = replace(HYBRID, layer_kinds=(LayerKind.FULL_ATTENTION,), gated_delta_net=None)
ATTENTION = "paged_attention (decode)"
DECODE, PREFILL = "gated_delta_rule (decode)", "gated_delta_rule (prefill)"


def on(*capability: int) -> DeviceTraits:
    return DeviceTraits("a GPU", (capability[0], capability[1]))


def served(support, kernel):
    (choice,) = [choice for choice in support.choices if choice.kernel == kernel]
    return choice


ARCHITECTURES = {
    # capability: (decode, prefill, prefill of attention, can be captured)
    (8, 0): ("flashinfer chunk_gated_delta_rule, one token each", "flashinfer chunk_gated_delta_rule", "fa2", False),
    (8, 9): ("flashinfer chunk_gated_delta_rule, one token each", "flashinfer chunk_gated_delta_rule", "fa2", False),
    (9, 0): (
        "flashinfer gated_delta_rule_decode_pretranspose",
        "flashinfer chunk_gated_delta_rule",
        "auto",
        True,
    ),
    (10, 0): ("flashinfer gated_delta_rule_decode_pretranspose", "flashinfer chunk_gated_delta_rule", "fa2", True),
    (10, 3): ("flashinfer gated_delta_rule_decode_pretranspose", "flashinfer chunk_gated_delta_rule", "fa2", True),
    (11, 0): (
        "flashinfer gated_delta_rule_decode_pretranspose",
        "torch, and the decodes of the same step with it",
        "fa2",
        True,
    ),
    (12, 0): ("flashinfer gated_delta_rule_decode_pretranspose", "flashinfer chunk_gated_delta_rule", "fa2", True),
    (12, 1): ("flashinfer gated_delta_rule_decode_pretranspose", "flashinfer chunk_gated_delta_rule", "fa2", True),
}


@pytest.mark.parametrize("capability", ARCHITECTURES, ids=lambda pair: f"sm{pair[0]}{pair[1]}")
def test_each_architecture_has_its_kernels(capability):
    decode, prefill, backend, can_capture = ARCHITECTURES[capability]
    support = choose(on(*capability), HYBRID)
    assert served(support, DECODE).implementation == decode
    assert served(support, PREFILL).implementation == prefill
    assert served(support, ATTENTION).implementation.startswith("flashinfer")
    assert support.prefill_backend == backend
    assert support.can_capture is can_capture


def test_without_a_gpu_torch_serves_everything():
    support = choose(CPU, HYBRID, conv_trouble="Triton needs a GPU", gated_norm_trouble="Triton needs a GPU")
    assert {choice.implementation for choice in support.choices} == {"torch", "torch, without the host"}
    assert not support.can_capture


def test_a_model_without_linear_layers_is_captured_wherever_its_attention_is():
    support = choose(on(8, 0), PLAIN)
    assert support.can_capture
    assert support.is_complete
    assert not [choice for choice in support.choices if "delta" in choice.kernel]


CASES = {
    "a head dim that flashinfer has not": (
        replace(HYBRID, attention=replace(HYBRID.attention, head_dim=96)),
        {},
        {ATTENTION: "head dim 96; flashinfer has 64, 128, 256", "append_paged_kv": "head dim 96"},
    ),
    "rotated dims of which a half is not 16 bytes": (
        replace(HYBRID, rope=RopeConfig(theta=1e4, rotary_dim=24)),
        {},
        {"apply_rope": "24 rotated dims are no multiple of 16"},
    ),
    "heads of 64 in linear layers": (
        replace(
            HYBRID,
            gated_delta_net=GatedDeltaNetConfig(
                num_k_heads=1, num_v_heads=2, key_head_dim=64, value_head_dim=128, conv_kernel_size=4
            ),
        ),
        {},
        {DECODE: "heads of 64 and 128", PREFILL: "heads of 64 and 128"},
    ),
    "CUDA 12 on a B200": (
        HYBRID,
        {"cuda_version": "12.9"},
        {PREFILL: "on sm100 flashinfer's chunked kernel needs CUDA 13; torch is built for 12.9"},
    ),
    "a CuTe DSL without this GPU": (
        HYBRID,
        {"dsl_trouble": "it does not compile"},
        {DECODE: "it does not compile", PREFILL: "it does not compile"},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_flashinfer_lacks_goes_to_an_alternative_that_says_why(case):
    config, options, reasons = CASES[case]
    support = choose(on(10, 0), config, **options)
    for kernel, reason in reasons.items():
        choice = served(support, kernel)
        assert choice.implementation.startswith("torch")
        assert choice.reason.startswith(reason)
    others = {choice.kernel for choice in support.choices if choice.implementation == "torch" and choice.reason}
    assert others <= {*reasons, "append_paged_kv", "apply_rope", "paged_attention (prefill)"}
