"""Runs a model over pages and slots that a test hands out, and a tiny random twin of it in transformers."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers

from engine.kernels import BatchLayout, Kernels, StateCapture
from engine.models.registry import Model
from engine.storage import allocate_state


@dataclass
class Sequence:
    slot: int
    pages: list[int] = field(default_factory=list)
    length: int = 0


class Driver:
    """Pages and slots start as NaN and are handed out in random order, or in ascending order if `adjacent`."""

    def __init__(
        self,
        model: Model,
        kernels: Kernels,
        *,
        num_pages=256,
        page_size=16,
        num_slots=16,
        seed=0,
        adjacent=False,
        kv_dtype=None,
    ):
        self.model, self.kernels, self.page_size = model, kernels, page_size
        self.state = allocate_state(
            model.config,
            num_pages=num_pages,
            page_size=page_size,
            num_slots=num_slots,
            dtype=kernels.dtype,
            device=kernels.device,
            kv_dtype=kv_dtype,
        )
        for tensor in (*self.state.kv, *self.state.conv, *self.state.recurrent):
            tensor.fill_(float("nan"))
        self.free_pages, self.free_slots = list(range(num_pages))[::-1], list(range(num_slots))[::-1]
        if not adjacent:
            random.Random(seed).shuffle(self.free_pages)
            random.Random(seed).shuffle(self.free_slots)

    def open(self) -> Sequence:
        return Sequence(slot=self.free_slots.pop())

    def close(self, sequence: Sequence) -> None:
        self.free_pages += sequence.pages
        self.free_slots.append(sequence.slot)

    def step(self, work: list[tuple[Sequence, list[int]]], captures: tuple[StateCapture, ...] = ()) -> torch.Tensor:
        """Compute each sequence's next tokens (decodes first); returns the logits of each one's last token."""
        layout = self.layout(work, captures)
        with torch.inference_mode():
            self.kernels.plan(layout)
            token_ids = torch.tensor([token for _, tokens in work for token in tokens])
            hidden = self.model.forward(self.kernels, self.state, token_ids)
            return self.model.logits(self.kernels, hidden[layout.qo_indptr[1:].long() - 1])

    def layout(self, work, captures=()) -> BatchLayout:
        positions, kv_indices, kv_indptr, last_page_len, has_state = [], [], [0], [], []
        for sequence, tokens in work:
            has_state.append(sequence.length > 0)
            positions += range(sequence.length, sequence.length + len(tokens))
            sequence.length += len(tokens)
            while len(sequence.pages) * self.page_size < sequence.length:
                sequence.pages.append(self.free_pages.pop())
            kv_indices += sequence.pages
            kv_indptr.append(len(kv_indices))
            last_page_len.append((sequence.length - 1) % self.page_size + 1)
        is_decode = [len(tokens) == 1 and had for (_, tokens), had in zip(work, has_state, strict=True)]
        assert is_decode == sorted(is_decode, reverse=True), "decodes come first"
        lengths = torch.tensor([0, *(len(tokens) for _, tokens in work)])
        return BatchLayout(
            num_decodes=sum(is_decode),
            qo_indptr=lengths.cumsum(0).int(),
            kv_indptr=torch.tensor(kv_indptr, dtype=torch.int32),
            kv_indices=torch.tensor(kv_indices, dtype=torch.int32),
            kv_last_page_len=torch.tensor(last_page_len, dtype=torch.int32),
            positions=torch.tensor(positions, dtype=torch.int32),
            state_slots=torch.tensor([sequence.slot for sequence, _ in work], dtype=torch.int32),
            has_initial_state=torch.tensor(has_state),
            page_size=self.page_size,
            captures=captures,
        )


def make_twin(config: transformers.PretrainedConfig, folder: Path, *, seed=0, dtype=torch.float32, shards=1):
    """A transformers model with random weights, saved to `folder`; returned in float32, in eval mode.

    Matrices are drawn large enough that the logits of different tokens lie well apart, and norms away from their rest.
    """
    torch.manual_seed(seed)
    # The automatic class would drop the vision tower.
    is_full = isinstance(config, transformers.Qwen3_5Config)
    auto = transformers.Qwen3_5ForConditionalGeneration if is_full else transformers.AutoModelForCausalLM
    model = auto(config) if is_full else auto.from_config(config, attn_implementation="sdpa")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("A_log", "dt_bias")) or "embed" in name:
                parameter.normal_(0.0, 1.0)
            elif parameter.dim() >= 2:
                parameter.normal_(0.0, 1.5 / parameter[0].numel() ** 0.5)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.2)
        model.tie_weights()
    model = model.to(dtype)
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    model.save_pretrained(folder, max_shard_size=f"{nbytes // shards // 1000 + 64}KB" if shards > 1 else "5GB")
    # Loaded anew: casting the model in place would also round its rotary frequencies.
    return auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
