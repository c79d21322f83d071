"""What is set aside for steps covers what they take, told by following every tensor of one."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine.graphs import MOST_ROWS
from engine.kernels import SamplingBatch
from engine.kernels.device import DeviceTraits
from engine.kernels.flashinfer.backend import FlashinferKernels
from engine.kernels.torch import TorchKernels
from engine.models.config import ModelConfig
from engine.models.qwen3_5 import parse_config
from engine.models.registry import load_model, read_config
from engine.step_memory import Part, step_parts
from engine.storage import allocate_state
from tests.engine.kernels.flashinfer.reference_library import ReferenceLibrary
from tests.engine.kernels.layouts import make_layout
from tests.engine.sparse_checkpoint import TEXT_CONFIG
from tests.engine.weights.published import write_published
from tests.engine.weights.tiny_checkpoints import TINY_CONFIG

TOKENS, PAGE_SIZE = 512, 64
EIGHTH_OF_27B = {
    "hidden_size": 640,
    "intermediate_size": 2176,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}


class PeakBytes(TorchDispatchMode):
    """The most bytes that tensors had at once which came into being under this mode."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._live: dict[int, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {storage._cdata for storage in _storages((args, kwargs))}
        result = function(*args, **(kwargs or {}))
        for storage in _storages(result):
            if storage._cdata not in given and storage._cdata not in self._live:
                self._live[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self._live.pop, storage._cdata, None)
        self.peak = max(self.peak, sum(self._live.values()))
        return result


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    return [tensor.untyped_storage() for tensor in tensors if not tensor.is_mkldnn]


def parts_of(config: ModelConfig, chunk: int = TOKENS, max_concurrency: int = 1) -> dict[str, Part]:
    parts = step_parts(config, chunk, max_concurrency, on_gpu=True, available_bytes=2**34)
    return {part.name: part for part in parts}


@pytest.mark.parametrize("kind", ["linear_attention", "full_attention"])
def test_activations_cover_a_prefill_even_by_the_alternatives_in_plain_torch(tmp_path: Path, kind: str) -> None:
    text = TINY_CONFIG["text_config"] | EIGHTH_OF_27B | {"layer_types": [kind], "num_hidden_layers": 1}
    write_published("bf16 3.8", tmp_path, config=TINY_CONFIG | {"text_config": text})
    config, kernels = read_config(tmp_path), TorchKernels(torch.bfloat16)
    model = load_model(tmp_path, kernels)
    sizes = {"num_pages": TOKENS // PAGE_SIZE, "page_size": PAGE_SIZE, "num_slots": 1}
    state = allocate_state(config, **sizes, dtype=kernels.dtype, device=kernels.device)
    tokens = torch.zeros(TOKENS, dtype=torch.int64)
    kernels.plan(make_layout([TOKENS], page_size=PAGE_SIZE))
    with torch.inference_mode(), PeakBytes() as followed:
        model.forward(kernels, state, tokens)
    set_aside = parts_of(config)["activations"].nbytes
    assert set_aside / 8 < followed.peak <= set_aside


def test_logits_cover_the_picking_of_tokens() -> None:
    config = parse_config(TEXT_CONFIG)
    rows = 4
    batch = SamplingBatch(
        temperature=torch.ones(rows),
        top_k=torch.zeros(rows, dtype=torch.int32),
        top_p=torch.full((rows,), 0.9),
        min_p=torch.full((rows,), 0.01),
        seeds=torch.zeros(rows, dtype=torch.int64),
        offsets=torch.zeros(rows, dtype=torch.int64),
    )
    kernels = TorchKernels(torch.bfloat16)
    with torch.inference_mode(), PeakBytes() as followed:
        logits = torch.zeros(rows, config.vocab_size, dtype=torch.bfloat16).float()
        logits.log_softmax(dim=-1)
        kernels.sample(logits, batch)
    assert followed.peak <= parts_of(config, max_concurrency=rows)["logits"].nbytes


def test_graphs_and_plans_are_counted_for_as_many_batch_sizes_as_are_captured() -> None:
    config = parse_config(TEXT_CONFIG)
    most, more = (parts_of(config, max_concurrency=rows) for rows in (MOST_ROWS, 4 * MOST_ROWS))
    for name in ("workspace", "CUDA graphs"):
        assert most[name].nbytes == more[name].nbytes
        assert parts_of(config, max_concurrency=MOST_ROWS - 1)[name].nbytes < most[name].nbytes


def test_the_workspace_is_what_the_attention_allocates() -> None:
    config = parse_config(TEXT_CONFIG)
    hopper = DeviceTraits("an H100", (9, 0))
    kernels = FlashinferKernels(torch.device("cpu"), torch.bfloat16, config, ReferenceLibrary(), hopper)
    kernels.prepare_decodes(3, 64)
    assert parts_of(config, max_concurrency=3)["workspace"].nbytes == kernels.workspace_bytes
