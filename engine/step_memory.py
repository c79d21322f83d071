"""What the steps take on the device besides weights, KV pages and states: each part, and how it comes about."""

from __future__ import annotations

from dataclasses import dataclass

from engine.graphs import MOST_ROWS
from engine.models.config import ModelConfig

_MIB = 1024 * 1024

FLOAT_BYTES = 4
LOGIT_COPIES = 8
"""Rows of the vocabulary in float32 that are alive while a token is picked: the head's output, its float32 copy,
log-probabilities, probabilities, and a sort's values and (as int64) indices."""
ATTENTION_WORKSPACE_BYTES = 128 * _MIB
"""For partial results of split attention: what flashinfer recommends, once for all layers and batch sizes."""
INDEX_WORKSPACE_BYTES = 8 * _MIB
"""Each wrapper of flashinfer's allocates this for its plan."""
EAGER_WRAPPERS = 2
"""One for prefill and one for decode; besides these, each captured batch size has its own."""
GRAPH_BYTES_PER_LAYER = _MIB // 2
"""What a captured decode step keeps on the device beside its tensors: its kernels' arguments and the driver's nodes.
vLLM's logs show 0.4 MiB (1B, 16 layers: 0.21 GiB for 35 sizes) to 0.8 MiB a layer (26 MiB a size)."""
RESERVE_BYTES = 512 * _MIB
"""Left alone on a GPU, whatever its size: cuBLAS's workspaces (32 MiB a stream), modules that are loaded when they are
first called, the driver's stacks."""
RESERVE_PERCENT = 2
"""And so much of what there is beside the weights: the allocator's rounding and fragmentation, and the errors of
what is estimated here. It gives its own cache back before it fails, so too little is slow before it is fatal."""


@dataclass(frozen=True, slots=True)
class Part:
    """One line of a plan."""

    name: str
    nbytes: int
    how: str
    """How the bytes come about, for people."""
    flag: str = ""
    """The one that lowers them; empty where none does."""


def step_parts(
    config: ModelConfig, chunk: int, max_concurrency: int, *, on_gpu: bool, available_bytes: int
) -> tuple[Part, ...]:
    """In the order in which they are subtracted from `available_bytes`, which is what there is beside the weights."""
    activations = activation_part(config, chunk, max_concurrency)
    if not on_gpu:
        logits = _logits_part(config, max_concurrency, copies=2)
        return activations, logits
    return (
        reserve_part(available_bytes),
        _workspace_part(max_concurrency),
        activations,
        _logits_part(config, max_concurrency, LOGIT_COPIES),
        _graphs_part(config, max_concurrency),
    )


def activation_part(config: ModelConfig, chunk: int, max_concurrency: int) -> Part:
    """The widest activations of a layer, in float32, as the alternatives to fused kernels compute."""
    rows = chunk + max_concurrency
    how = (
        f"{rows:,} tokens of a chunk of {chunk:,} and {max_concurrency:,} decodes, "
        f"4 x {config.intermediate_size:,} + 8 x {config.hidden_size:,} float32 each"
    )
    return Part("activations", rows * _width(config) * FLOAT_BYTES, how, "--prefill-chunk")


def reserve_part(available_bytes: int) -> Part:
    nbytes = RESERVE_BYTES + available_bytes * RESERVE_PERCENT // 100
    how = f"{RESERVE_BYTES // _MIB} MiB and {RESERVE_PERCENT}% of what the weights leave, for the allocator and cuBLAS"
    return Part("reserve", nbytes, how)


def _logits_part(config: ModelConfig, max_concurrency: int, copies: int) -> Part:
    how = f"{max_concurrency:,} rows of {config.vocab_size:,} float32, {copies} times"
    return Part("logits", copies * max_concurrency * config.vocab_size * FLOAT_BYTES, how, "--max-concurrency")


def _workspace_part(max_concurrency: int) -> Part:
    wrappers = EAGER_WRAPPERS + _graphs(max_concurrency)
    nbytes = ATTENTION_WORKSPACE_BYTES + wrappers * INDEX_WORKSPACE_BYTES
    how = (
        f"attention: {ATTENTION_WORKSPACE_BYTES // _MIB} MiB, and {INDEX_WORKSPACE_BYTES // _MIB} MiB for each of "
        f"{wrappers} plans"
    )
    return Part("workspace", nbytes, how)


def _graphs_part(config: ModelConfig, max_concurrency: int) -> Part:
    """Graphs share the tensors of the largest; the logits lie beside, for what comes after a replay."""
    rows = _graphs(max_concurrency)
    a_row = (_width(config) + 3 * config.vocab_size) * FLOAT_BYTES
    nbytes = rows * (config.num_layers * GRAPH_BYTES_PER_LAYER + a_row)
    how = (
        f"{rows:,} batch sizes: {config.num_layers} layers at {GRAPH_BYTES_PER_LAYER // 1024} KiB in each, "
        f"and {rows:,} rows of {_width(config):,} + 3 x {config.vocab_size:,} float32 together"
    )
    return Part("CUDA graphs", nbytes, how)


def _graphs(max_concurrency: int) -> int:
    return min(max_concurrency, MOST_ROWS)


def _width(config: ModelConfig) -> int:
    """Elements of a token's activations in the widest layer."""
    return 4 * config.intermediate_size + 8 * config.hidden_size
