"""A tiny hybrid model with random weights, as a folder in Hugging Face layout, and engines on it."""

import contextlib

import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from engine.engine import Engine, EngineOptions

SMALL = {
    "max_concurrency": 4,
    "max_pending_requests": 8,
    "prefill_chunk": 32,
    "kv_pages": 128,
    "page_size": 4,
    "device_state_slots": 2,
    "host_cache_mib": 1,
    "max_context": 256,
}


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny-hybrid")
    config = Qwen3_5TextConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=299,
        initializer_range=0.2,
    )
    torch.manual_seed(0)
    Qwen3_5ForCausalLM(config).float().save_pretrained(folder)
    vocab = {token: index for index, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    library = tokenizers.Tokenizer(models.BPE(vocab, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    library.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def running_engine(tiny_folder):
    """A context manager: an engine that runs; when it is left, its ledger is sound and only the cache holds units."""

    @contextlib.asynccontextmanager
    async def run(**options):
        engine = Engine.load(tiny_folder, EngineOptions(**{**SMALL, **options}))
        await engine.start()
        try:
            yield engine
            assert await engine.drain()
            assert engine.check() == []
            pools = engine.snapshot().kv_pages, engine.snapshot().state_slots
            assert [(pool.pinned, pool.in_flight) for pool in pools] == [(0, 0)] * 2
            engine._loop.scheduler.cache.reset()
            pools = engine.snapshot().kv_pages, engine.snapshot().state_slots
            assert [pool.free for pool in pools] == [pool.capacity for pool in pools]
        finally:
            await engine.stop()

    return run
