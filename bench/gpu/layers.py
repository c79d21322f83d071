"""Random layers of a hybrid in any weight format, and the pools and batches to run them with."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from bench.gpu.batches import make_layout
from engine.kernels import UNSCALED, BatchLayout, Kernels
from engine.models import qwen3_5
from engine.models.config import LayerKind, ModelConfig
from engine.models.parts import Mlp, Outer
from engine.models.registry import Model
from engine.models.rope import cos_sin_cache
from engine.storage import ModelState, allocate_state
from engine.weights.formats import DenseWeight, Fp8Weight, LinearWeight, Nvfp4Weight
from engine.weights.nvfp4 import E2M1_MAX, E4M3_MAX

VOCAB = 64
"""A step reads one row of the embedding for each token, whatever its size; the real head is measured by itself."""


@dataclass(frozen=True, slots=True)
class Stack:
    """Some layers of a model, prepared for `kernels`. Its config has these layers and no other."""

    config: ModelConfig
    kernels: Kernels
    weights: qwen3_5.Weights

    @property
    def linear_bytes(self) -> int:
        """What the linear layers' weights take as they are stored here."""
        return sum(layer.nbytes for layer in self._linears())

    @property
    def linear_weights(self) -> int:
        """How many weights they have."""
        return sum(layer.in_features * layer.out_features for layer in self._linears())

    @property
    def kinds(self) -> list[str]:
        """What serves them."""
        return list(dict.fromkeys(layer.kind for layer in self._linears()))

    def _linears(self) -> list:  # type: ignore[type-arg]
        found = []
        for layer in self.weights.layers:
            mixer = layer.mixer
            first = mixer.qkv if isinstance(mixer, qwen3_5.Attention) else mixer.inputs
            found += [first, mixer.out, layer.mlp.gate_up, layer.mlp.down]
        return found

    def only(self, kind: LayerKind) -> Stack:
        """The layers of one kind; the weights are shared."""
        pairs = [pair for pair in zip(self.config.layer_kinds, self.weights.layers, strict=True) if pair[0] is kind]
        kinds, layers = zip(*pairs, strict=True)
        return Stack(replace(self.config, layer_kinds=kinds), self.kernels, replace(self.weights, layers=layers))

    def model(self) -> Model:
        """As the engine's graphs take it."""
        return Model(
            config=self.config,
            weight_bytes=self.linear_bytes,
            forward=functools.partial(qwen3_5.forward, self.weights, self.config),
            logits=functools.partial(qwen3_5.logits, self.weights),
        )


def random_linear(format_name: str, rows: int, columns: int, device: torch.device, name: str) -> LinearWeight:
    """Drawn where it will be used: random bits, and scales that keep activations at their size. No checkpoint is read,
    and nothing is rounded."""
    size = columns**-0.5
    if format_name == "bf16":
        return DenseWeight(torch.randn(rows, columns, device=device, dtype=torch.bfloat16) * size, name=name)
    if format_name == "fp8":
        weight = torch.randn(rows, columns, device=device, dtype=torch.bfloat16).mul_(64.0).to(torch.float8_e4m3fn)
        return Fp8Weight(weight, torch.tensor(size / 64.0), torch.tensor(6.0 / E4M3_MAX), name=name)
    packed = torch.randint(256, (rows, columns // 2), device=device, dtype=torch.uint8)
    scale = torch.ones(rows, columns // 16, device=device).to(torch.float8_e4m3fn)
    # The root mean square of the sixteen e2m1 values is 2.8.
    return Nvfp4Weight(packed, scale, torch.tensor(size / 2.8), torch.tensor(6.0 / (E2M1_MAX * E4M3_MAX)), name=name)


def random_stack(config: ModelConfig, kernels: Kernels, format_name: str, max_tokens: int) -> Stack:
    """Every layer of `config` with its own weights. In the fp4 and fp8 formats all linear layers are in it, but b and a
    of the gated delta rule, which stay plain as in checkpoints; contexts up to `max_tokens`."""
    config = replace(config, vocab_size=VOCAB)
    device, hidden = kernels.device, config.hidden_size

    def norm(size: int) -> torch.Tensor:
        return kernels.prepare_tensor(torch.ones(size))

    def prepare(name: str, rows: Sequence[int], columns: int, formats: Sequence[str] = ()) -> object:
        used = formats or [format_name] * len(rows)
        shards = [
            random_linear(each, count, columns, device, f"{name}{i}")
            for i, (each, count) in enumerate(zip(used, rows, strict=True))
        ]
        return kernels.prepare_linear(shards)

    def attention(prefix: str) -> qwen3_5.Attention:
        heads = config.attention
        q_rows, kv_rows = heads.num_q_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim
        return qwen3_5.Attention(
            qkv=prepare(f"{prefix}.self_attn.qkv", (2 * q_rows, kv_rows, kv_rows), hidden),  # type: ignore[arg-type]
            q_norm=norm(heads.head_dim),
            k_norm=norm(heads.head_dim),
            kv_scales=UNSCALED,
            out=prepare(f"{prefix}.self_attn.o_proj", (hidden,), q_rows),  # type: ignore[arg-type]
        )

    def gated_delta_net(prefix: str) -> qwen3_5.GatedDeltaNet:
        gdn = config.gated_delta_net
        assert gdn is not None, "a hybrid"
        rows = (gdn.conv_dim, gdn.value_dim, gdn.num_v_heads, gdn.num_v_heads)
        formats = (format_name, format_name, "bf16", "bf16")
        conv = torch.randn(gdn.conv_dim, gdn.conv_kernel_size) * 0.5
        return qwen3_5.GatedDeltaNet(
            inputs=prepare(f"{prefix}.linear_attn.in_proj", rows, hidden, formats),  # type: ignore[arg-type]
            conv=kernels.prepare_tensor(conv),
            A_log=kernels.prepare_tensor(torch.zeros(gdn.num_v_heads), torch.float32),
            dt_bias=kernels.prepare_tensor(torch.zeros(gdn.num_v_heads), torch.float32),
            norm=norm(gdn.value_head_dim),
            out=prepare(f"{prefix}.linear_attn.out_proj", (hidden,), gdn.value_dim),  # type: ignore[arg-type]
        )

    layers = []
    inner = config.intermediate_size
    for i, kind in enumerate(config.layer_kinds):
        prefix = f"model.layers.{i}"
        mlp = Mlp(
            gate_up=prepare(f"{prefix}.mlp.gate_up", (inner, inner), hidden),  # type: ignore[arg-type]
            down=prepare(f"{prefix}.mlp.down_proj", (hidden,), inner),  # type: ignore[arg-type]
        )
        mixer = attention(prefix) if kind is LayerKind.FULL_ATTENTION else gated_delta_net(prefix)
        layers.append(qwen3_5.Layer(norm(hidden), mixer, norm(hidden), mlp))
    outer = Outer(
        embedding=kernels.prepare_tensor(torch.randn(VOCAB, hidden)),
        cos_sin=kernels.prepare_tensor(cos_sin_cache(config.rope, max_tokens), torch.float32),
        final_norm=norm(hidden),
        lm_head=kernels.prepare_linear([random_linear("bf16", VOCAB, hidden, device, "lm_head")]),
    )
    return Stack(config, kernels, qwen3_5.Weights(outer, tuple(layers)))


def state_for(stack: Stack, batch: int, tokens: int, page_size: int) -> ModelState:
    """Pools for `batch` sequences of `tokens`, in the order in which the sequences use them."""
    return allocate_state(
        stack.config,
        num_pages=batch * -(-tokens // page_size),
        page_size=page_size,
        num_slots=batch,
        dtype=stack.kernels.dtype,
        device=stack.kernels.device,
    )


def step_layout(new: int, old: int, batch: int, page_size: int) -> BatchLayout:
    """`batch` sequences with `new` tokens each behind `old`."""
    count = -(-(new + old) // page_size)
    pages = [list(range(i * count, (i + 1) * count)) for i in range(batch)]
    return make_layout([new] * batch, [old] * batch, page_size=page_size, pages=pages, slots=range(batch), captures=())
