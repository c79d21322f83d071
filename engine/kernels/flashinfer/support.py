"""Which kernel serves what on which architecture, as flashinfer 0.7.4's sources say.

Where flashinfer refuses by itself (`compute capability`, head sizes), the same limits stand here, so that the choice is
made at start and not by an exception in a step.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.kernels import KernelChoice
from engine.kernels.device import DeviceTraits
from engine.models.config import ModelConfig

GDN_HEAD_DIM = 128
ATTENTION_HEAD_DIMS = (64, 128, 256)
ROTARY_STEP = 16
"""Both halves of what is rotated must be read 16 bytes at a time."""
_LEAST = (8, 0)
_CHUNKS_BY_MAJOR = (8, 9, 10, 12)
"""gdn_prefill.py: SM8x, SM90, SM100/SM103 and SM120/SM121; all of them take slots to read, write and capture in."""
_DECODE_LEAST = (9, 0)
"""gdn_decode.py: "Requires SM90+"."""
_BLACKWELL_CUDA_MAJOR = 13
"""gdn_prefill.py: on SM10x, "only supported on CUDA 13+"."""


@dataclass(frozen=True, slots=True)
class Support:
    """What flashinfer serves here; the rest is the torch backend's, on the same device."""

    attention: bool
    rope: bool
    gdn_decode: bool
    """If False and `gdn_prefill`, decodes are chunks of one token."""
    gdn_prefill: bool
    """If False, the torch backend's delta rule serves every step that has more than decodes."""
    fused: bool
    """Norms, activations and sampling."""
    prefill_backend: str
    choices: tuple[KernelChoice, ...]

    @property
    def is_complete(self) -> bool:
        """Whether no step needs the torch backend's plan."""
        return self.attention and self.rope and self.gdn_prefill

    @property
    def can_capture(self) -> bool:
        """Whether a step of decodes runs without the host. The torch backend's attention and delta rule ask it."""
        return self.attention and self.rope and self.gdn_decode


def choose(
    traits: DeviceTraits,
    config: ModelConfig,
    *,
    cuda_version: str | None = None,
    dsl_trouble: str = "",
    conv_trouble: str = "",
    gated_norm_trouble: str = "",
) -> Support:
    """`cuda_version` is what torch was built for, None where that does not matter; `dsl_trouble` is why flashinfer's
    kernels in CuTe DSL cannot be compiled for this GPU, `conv_trouble` and `gated_norm_trouble` why our kernels in
    Triton do not serve; empty where they do."""
    attention = _attention_trouble(traits, config)
    rope = _rope_trouble(traits, config)
    gdn = config.gated_delta_net
    decode, prefill = _decode_trouble(traits, config), _prefill_trouble(traits, config, cuda_version)
    decode, prefill = decode or dsl_trouble, prefill or dsl_trouble
    fused = _least_trouble(traits)
    backend = "auto" if traits.capability is not None and traits.capability[0] == 9 else "fa2"
    choices = [
        _choice("embedding", "torch", "torch", ""),
        *(_choice(kernel, f"flashinfer {name}", "torch", fused) for kernel, name in _FUSED),
        _choice("apply_rope", "flashinfer apply_rope_with_cos_sin_cache_inplace", "torch", rope),
        _choice("append_paged_kv", "flashinfer append_paged_kv_cache", "torch", attention),
        _choice("paged_attention (decode)", "flashinfer BatchDecodeWithPagedKVCacheWrapper fa2", "torch", attention),
        _choice(
            "paged_attention (prefill)", f"flashinfer BatchPrefillWithPagedKVCacheWrapper {backend}", "torch", attention
        ),
    ]
    if gdn is not None:
        choices += [
            _choice("gated_rms_norm", "triton", "torch" if fused else "flashinfer rmsnorm, torch", gated_norm_trouble),
            _choice("causal_conv", "triton", "torch, without the host", conv_trouble),
            *_gdn_choices(decode, prefill),
        ]
    return Support(
        attention=not attention,
        rope=not rope,
        gdn_decode=gdn is None or not decode,
        gdn_prefill=gdn is None or not prefill,
        fused=not fused,
        prefill_backend=backend,
        choices=tuple(choices),
    )


_FUSED = (
    ("rms_norm", "rmsnorm"),
    ("fused_add_rms_norm", "fused_add_rmsnorm"),
    ("silu_and_mul", "silu_and_mul"),
    ("sample", "softmax, top_k_renorm_probs, top_p_renorm_probs"),
)


def _gdn_choices(decode: str, prefill: str) -> tuple[KernelChoice, KernelChoice]:
    chunked = "flashinfer chunk_gated_delta_rule"
    first = _choice("gated_delta_rule (decode)", "flashinfer gated_delta_rule_decode_pretranspose", "torch", decode)
    if decode and not prefill:
        first = KernelChoice("gated_delta_rule (decode)", f"{chunked}, one token each", decode)
    second = "torch, and the decodes of the same step with it" if not decode else "torch"
    return first, _choice("gated_delta_rule (prefill)", chunked, second, prefill)


def _choice(kernel: str, first: str, alternative: str, trouble: str) -> KernelChoice:
    return KernelChoice(kernel, alternative, trouble) if trouble else KernelChoice(kernel, first)


def _least_trouble(traits: DeviceTraits) -> str:
    if traits.capability is None:
        return "no GPU"
    if traits.capability < _LEAST:
        return f"{traits.architecture} is older than SM80"
    return ""


def _attention_trouble(traits: DeviceTraits, config: ModelConfig) -> str:
    head_dim = config.attention.head_dim
    if head_dim not in ATTENTION_HEAD_DIMS:
        return f"head dim {head_dim}; flashinfer has {', '.join(map(str, ATTENTION_HEAD_DIMS))}"
    return _least_trouble(traits)


def _rope_trouble(traits: DeviceTraits, config: ModelConfig) -> str:
    if config.rope.rotary_dim % ROTARY_STEP:
        return f"{config.rope.rotary_dim} rotated dims are no multiple of {ROTARY_STEP}"
    return _attention_trouble(traits, config)


def _gdn_trouble(config: ModelConfig) -> str:
    gdn = config.gated_delta_net
    if gdn is None or (gdn.key_head_dim, gdn.value_head_dim) == (GDN_HEAD_DIM, GDN_HEAD_DIM):
        return ""
    return f"heads of {gdn.key_head_dim} and {gdn.value_head_dim}; flashinfer has {GDN_HEAD_DIM} for both"


def _decode_trouble(traits: DeviceTraits, config: ModelConfig) -> str:
    if traits.capability is not None and _LEAST <= traits.capability < _DECODE_LEAST:
        return f"flashinfer's decode kernel begins with SM90; this is {traits.architecture}"
    return _least_trouble(traits) or _gdn_trouble(config)


def _prefill_trouble(traits: DeviceTraits, config: ModelConfig, cuda_version: str | None) -> str:
    trouble = _least_trouble(traits) or _gdn_trouble(config)
    if trouble or traits.capability is None:
        return trouble
    major = traits.capability[0]
    if major not in _CHUNKS_BY_MAJOR:
        return f"flashinfer's chunked kernel has no {traits.architecture}"
    if major == 10 and cuda_version is not None and int(cuda_version.split(".")[0]) < _BLACKWELL_CUDA_MAJOR:
        return f"on {traits.architecture} flashinfer's chunked kernel needs CUDA 13; torch is built for {cuda_version}"
    return ""
