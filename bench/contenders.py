"""Two ways to run one model folder in float32: this engine's model and transformers'."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any, Protocol

import torch

from engine.kernels import BatchLayout, SamplingBatch
from engine.kernels.select import select_kernels
from engine.kernels.torch.linear import dense_weight
from engine.models.registry import load_model
from engine.storage import allocate_state
from engine.weights.checkpoint import open_checkpoint

PAGE_SIZE = 16


class Contender(Protocol):
    """Something that can be timed; every method returns seconds."""

    name: str

    def prefill(self, tokens: int) -> float:
        """One prompt of `tokens`, from nothing to the logits of its last token."""
        ...

    def start_decode(self, batch: int, context_tokens: int, steps: int) -> None:
        """Read `batch` prompts of `context_tokens`, with room for `steps` tokens more each."""
        ...

    def decode(self, steps: int) -> float:
        """`steps` greedy steps of that batch, from token ids to the next token ids; seconds for all of them."""
        ...


class Dalsegno:
    """This engine's model on its kernels, with pages and slots as the engine would lay them out."""

    name = "dalsegno"

    def __init__(self, folder: Path) -> None:
        self.kernels = select_kernels("torch")
        self.model = load_model(folder, self.kernels)
        self.vocab_size = self.model.config.vocab_size

    def prefill(self, tokens: int) -> float:
        self._allocate(1, tokens)
        prompt = _prompts(1, tokens, self.vocab_size)
        started = time.perf_counter()
        self._step(prompt, [0])
        return time.perf_counter() - started

    def start_decode(self, batch: int, context_tokens: int, steps: int) -> None:
        self._allocate(batch, context_tokens + steps)
        rows = [
            self._step(prompt[None], [i])[0]
            for i, prompt in enumerate(_prompts(batch, context_tokens, self.vocab_size))
        ]
        self.tokens = torch.stack(rows).argmax(-1)

    def decode(self, steps: int) -> float:
        batch = len(self.tokens)
        greedy = SamplingBatch(*(torch.zeros(batch) for _ in range(6)))
        started = time.perf_counter()
        for _ in range(steps):
            self.tokens = self.kernels.sample(self._step(self.tokens[:, None], list(range(batch))), greedy)
        return time.perf_counter() - started

    def _allocate(self, batch: int, tokens: int) -> None:
        self.pages_each = -(-tokens // PAGE_SIZE)
        self.lengths = [0] * batch
        self.state = allocate_state(
            self.model.config,
            num_pages=batch * self.pages_each,
            page_size=PAGE_SIZE,
            num_slots=batch,
            dtype=self.kernels.dtype,
            device=self.kernels.device,
        )

    def _step(self, token_ids: torch.Tensor, sequences: list[int]) -> torch.Tensor:
        """token_ids [sequences, n]; returns the logits of each last token."""
        n = token_ids.shape[1]
        before = [self.lengths[i] for i in sequences]
        after = [length + n for length in before]
        pages = [
            [i * self.pages_each + page for page in range(-(-length // PAGE_SIZE))]
            for i, length in zip(sequences, after, strict=True)
        ]
        layout = BatchLayout(
            num_decodes=len(sequences) if n == 1 and before[0] else 0,
            qo_indptr=torch.arange(0, len(sequences) * n + 1, n, dtype=torch.int32),
            kv_indptr=torch.tensor([0, *itertools.accumulate(map(len, pages))], dtype=torch.int32),
            kv_indices=torch.tensor(list(itertools.chain(*pages)), dtype=torch.int32),
            kv_last_page_len=torch.tensor([(length - 1) % PAGE_SIZE + 1 for length in after], dtype=torch.int32),
            positions=torch.tensor([p for old in before for p in range(old, old + n)], dtype=torch.int32),
            state_slots=torch.tensor(sequences, dtype=torch.int32),
            has_initial_state=torch.tensor([old > 0 for old in before]),
            page_size=PAGE_SIZE,
        )
        for i in sequences:
            self.lengths[i] += n
        with torch.inference_mode():
            self.kernels.plan(layout)
            hidden = self.model.forward(self.kernels, self.state, token_ids.flatten())
            return self.model.logits(self.kernels, hidden[n - 1 :: n])


class Transformers:
    """transformers at its best on this machine: sdpa, only the last logits, and the faster of its two caches."""

    name = "transformers"

    def __init__(self, folder: Path) -> None:
        self.model = _load_transformers(folder)
        self.vocab_size = self.model.config.get_text_config().vocab_size
        self.cache_kind: str | None = None

    def prefill(self, tokens: int) -> float:
        prompt = _prompts(1, tokens, self.vocab_size)
        cache = self._cache("dynamic", 0)
        started = time.perf_counter()
        self._run(prompt, cache)
        return time.perf_counter() - started

    def start_decode(self, batch: int, context_tokens: int, steps: int) -> None:
        seconds = {}
        for kind in ("static", "dynamic"):
            self._start(kind, batch, context_tokens, steps)
            self.decode(2)
            seconds[kind] = self.decode(4)
        self.cache_kind = min(seconds, key=lambda kind: seconds[kind])
        self._start(self.cache_kind, batch, context_tokens, steps)

    def decode(self, steps: int) -> float:
        started = time.perf_counter()
        for _ in range(steps):
            self.tokens = self._run(self.tokens, self.cache).argmax(-1)
        return time.perf_counter() - started

    def _start(self, kind: str, batch: int, context_tokens: int, steps: int) -> None:
        self.cache = self._cache(kind, context_tokens + steps)
        self.tokens = self._run(_prompts(batch, context_tokens, self.vocab_size), self.cache).argmax(-1)

    def _cache(self, kind: str, max_tokens: int) -> Any:
        from transformers import DynamicCache, StaticCache

        config = self.model.config.get_text_config()
        return (
            DynamicCache(config=config) if kind == "dynamic" else StaticCache(config=config, max_cache_len=max_tokens)
        )

    def _run(self, token_ids: torch.Tensor, cache: Any) -> torch.Tensor:
        with torch.inference_mode():
            return self.model(token_ids, cache=cache, use_cache=True, logits_to_keep=1).logits


def _prompts(batch: int, tokens: int, vocab_size: int) -> torch.Tensor:
    return torch.randint(vocab_size, (batch, tokens), generator=torch.Generator().manual_seed(tokens))


def _load_transformers(folder: Path) -> Any:
    """The folder's model in float32, quantised layers dequantised: transformers reads neither kind of NVFP4 here."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder).get_text_config()
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32).eval()
    with open_checkpoint(folder) as checkpoint, torch.no_grad():
        nested = checkpoint.has("model.language_model.embed_tokens.weight")
        for name, module in model.named_modules():
            prefix = name.replace("model.", "model.language_model.", 1) if nested else name
            if name == "lm_head" and config.tie_word_embeddings:
                continue
            if isinstance(module, torch.nn.Linear):
                has_bias = module.bias is not None
                layer = checkpoint.linear(prefix, module.out_features, module.in_features, has_bias=has_bias)
                module.weight.copy_(dense_weight(layer))
                if module.bias is not None and layer.bias is not None:
                    module.bias.copy_(layer.bias)
                continue
            for key, parameter in module.named_parameters(recurse=False):
                parameter.copy_(checkpoint.tensor(f"{prefix}.{key}", tuple(parameter.shape)))
        model.tie_weights()
    return model
