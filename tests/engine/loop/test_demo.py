"""The bundled model through the whole engine: chats together get the tokens that they get alone."""

import asyncio

import pytest

from engine.catalog import resolve_model
from engine.engine import Engine, EngineOptions, GenerationRequest, SamplingParams

pytestmark = pytest.mark.anyio

QUESTIONS = ["What is a KV cache?", "Tell me a short story about a cat.", "Hello!"]


async def answer(engine: Engine, name: str, question: str) -> tuple[int, ...]:
    prompt = engine.chat_template.render([{"role": "user", "content": question}])
    token_ids = tuple(engine.tokenizer.encode(prompt))
    sampling = SamplingParams(temperature=0.8, seed=len(question), max_tokens=16)
    generation = engine.submit(GenerationRequest(name, token_ids, sampling))
    return tuple([token_id async for delta in generation for token_id in delta.token_ids])


async def test_chats_with_the_bundled_model_do_not_disturb_each_other():
    engine = Engine.load(resolve_model("demo"), EngineOptions(kv_pages=256, prefill_chunk=16))
    await engine.start()
    try:
        alone = [await answer(engine, "r", question) for question in QUESTIONS]
        together = await asyncio.gather(*(answer(engine, question, question) for question in QUESTIONS))
        assert together == alone
        assert engine.check() == []
    finally:
        await engine.stop()
