"""From a folder to a model: which architecture its config.json names, and that architecture's functions."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from engine.errors import ModelLoadError, UnsupportedConfigError
from engine.kernels import Kernels
from engine.models import llama, qwen3, qwen3_5
from engine.models.config import ModelConfig
from engine.models.config_fields import read_eos_token_ids
from engine.models.parts import weight_bytes
from engine.storage import ModelState
from engine.weights.checkpoint import Checkpoint, open_checkpoint
from engine.weights.safetensors_files import read_json


class Architecture(Protocol):
    """What a module of `engine.models` offers; its weights are its own affair."""

    def parse_config(self, raw: dict[str, Any]) -> ModelConfig: ...

    def load_weights(self, checkpoint: Checkpoint, config: ModelConfig, kernels: Kernels) -> Any: ...

    def forward(
        self, weights: Any, config: ModelConfig, kernels: Kernels, state: ModelState, token_ids: torch.Tensor
    ) -> torch.Tensor: ...

    def logits(self, weights: Any, kernels: Kernels, hidden_rows: torch.Tensor) -> torch.Tensor: ...


ARCHITECTURES: dict[str, Architecture] = {
    "llama": llama,
    "qwen3": qwen3,
    "qwen3_5": qwen3_5,
    "qwen3_5_text": qwen3_5,
}
"""By `model_type` of config.json."""

_EXPERTS = "layers of experts (MoE)"
_NOT_BUILT = {
    "qwen3_moe": _EXPERTS,
    "qwen3_5_moe": _EXPERTS,
    "qwen3_5_moe_text": _EXPERTS,
    "qwen3_next": f"{_EXPERTS} and fused Gated DeltaNet projections (in_proj_qkvz, in_proj_ba)",
    "qwen4_exp": f"{_EXPERTS}, hyper-connections, n-gram embeddings and sparse attention",
    "qwen4_exp_text": f"{_EXPERTS}, hyper-connections, n-gram embeddings and sparse attention",
}
"""Relatives of what is built, and what they have that is not."""


@dataclass(frozen=True, slots=True)
class Model:
    """A loaded model: its config and two functions over its weights."""

    config: ModelConfig
    weight_bytes: int
    forward: Callable[[Kernels, ModelState, torch.Tensor], torch.Tensor]
    """(kernels, state, token_ids [n] int64) -> hidden [n, hidden] of the planned step, final norm applied."""
    logits: Callable[[Kernels, torch.Tensor], torch.Tensor]
    """(kernels, hidden_rows [rows, hidden]) -> float32 [rows, vocab]."""
    has_kv_scales: bool = False
    """Whether the checkpoint says how fp8 keys and values are scaled; where it does not, fp8 pages use the scale 1."""


def read_config(folder: Path) -> ModelConfig:
    """config.json, with the end tokens of generation_config.json where that has any.

    Raises UnsupportedConfigError that names the field, or ModelLoadError for a file that is missing or broken.
    """
    return _read(folder)[1]


def load_model(folder: Path, kernels: Kernels) -> Model:
    """Load the model in `folder` for `kernels`. Raises ModelLoadError, and its WeightsError that names the tensor."""
    architecture, config = _read(folder)
    with open_checkpoint(folder) as checkpoint:
        weights = architecture.load_weights(checkpoint, config, kernels)
        checkpoint.finish()
    return Model(
        config=config,
        weight_bytes=weight_bytes(weights),
        forward=functools.partial(architecture.forward, weights, config),
        logits=functools.partial(architecture.logits, weights),
        has_kv_scales=checkpoint.has_kv_scales,
    )


def _read(folder: Path) -> tuple[Architecture, ModelConfig]:
    path = folder / "config.json"
    if not path.is_file():
        raise ModelLoadError(f"{folder}: there is no config.json; expected a model folder in Hugging Face layout")
    raw = read_json(path)
    model_type = raw.get("model_type")
    architecture = ARCHITECTURES.get(model_type) if isinstance(model_type, str) else None
    if architecture is None:
        expected = f"one of {', '.join(ARCHITECTURES)}"
        if isinstance(model_type, str) and model_type in _NOT_BUILT:
            expected += f", which are dense; {_NOT_BUILT[model_type]} are not built"
        raise UnsupportedConfigError("model_type", model_type, expected)
    config = architecture.parse_config(raw)
    generation = folder / "generation_config.json"
    eos_token_ids = read_eos_token_ids(read_json(generation)) if generation.is_file() else ()
    return architecture, dataclasses.replace(config, eos_token_ids=eos_token_ids) if eos_token_ids else config
