"""A request whose logits are no numbers costs itself and nobody else: a real model with one broken embedding."""

import asyncio

import pytest
import safetensors.torch
import torch
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from engine.engine import FinishReason, GenerationRequest, SamplingParams
from engine.errors import EngineUnavailableError
from engine.events import StepFailed

pytestmark = pytest.mark.anyio

POISON = 280
HEALTHY = tuple(range(5, 55))


@pytest.fixture(scope="session")
def tiny_folder(tiny_folder, tmp_path_factory):
    """In the place of the healthy one: whatever has POISON before it is not a number."""
    folder = tmp_path_factory.mktemp("poisoned")
    for file in tiny_folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = Qwen3_5TextConfig.from_pretrained(tiny_folder, tie_word_embeddings=False)
    torch.manual_seed(0)
    model = Qwen3_5ForCausalLM(config).float()
    model.save_pretrained(folder)
    path = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    [name] = [name for name in tensors if name.endswith("embed_tokens.weight")]
    tensors[name][POISON] = torch.nan
    safetensors.torch.save_file(tensors, path, {"format": "pt"})
    return folder


async def ask(engine, prompt, name="r", **sampling):
    """Tokens, and the last delta."""
    params = SamplingParams(**{"max_tokens": 8, "temperature": 0.0, "ignore_eos": True} | sampling)
    deltas = [delta async for delta in engine.submit(GenerationRequest(name, tuple(prompt), params))]
    return [token for delta in deltas for token in delta.token_ids], deltas[-1]


def poisoned(place, length=100):
    """That prompt is not a number from `place` on."""
    return [POISON if at == place else 60 + at for at in range(length)]


@pytest.mark.parametrize("sampling", [{}, {"logprobs": 2, "temperature": 1.0, "seed": 3, "presence_penalty": 0.5}])
async def test_only_the_request_itself_fails(running_engine, sampling):
    seen = []
    async with running_engine() as engine:
        engine.observe(seen.append)
        expected, _ = await ask(engine, HEALTHY, **sampling)
        outcomes = await asyncio.gather(
            *(
                ask(engine, prompt, name=f"r{index}", **sampling)
                for index, prompt in enumerate([poisoned(3), HEALTHY, poisoned(5, 7), HEALTHY])
            ),
            return_exceptions=True,
        )
        assert [isinstance(each, EngineUnavailableError) for each in outcomes] == [True, False, True, False]
        assert "(NonFiniteLogitsError)" in str(outcomes[0])
        assert "rows" not in str(outcomes[0])
        assert [tokens for tokens, _ in (outcomes[1], outcomes[3])] == [expected, expected]
        assert (engine.snapshot().loop_restarts_total, engine.snapshot().step_failures_total) == (0, 0)
        failures = [event for event in seen if isinstance(event, StepFailed)]
        assert sum(each.requests for each in failures) == 2


@pytest.mark.parametrize("place", [0, 40, 99])
async def test_sent_again_and_again_it_takes_nothing_from_others_and_leaves_nothing_behind(running_engine, place):
    async with running_engine() as engine:
        await ask(engine, HEALTHY)
        for _ in range(7):
            with pytest.raises(EngineUnavailableError):
                await ask(engine, poisoned(place))
            assert engine.check() == []
        _, last = await ask(engine, HEALTHY)
        assert last.reuse.cached_tokens == len(HEALTHY) - 1
        assert last.finish_reason is FinishReason.LENGTH
        assert engine.snapshot().loop_restarts_total == 0
        found = engine._loop.scheduler.cache.match("look", "", tuple(poisoned(place)))
        assert found.cached_tokens <= place
        engine._loop.scheduler.cache.release(found)


async def test_what_it_was_resumed_from_is_not_resumed_from_again(running_engine):
    """A state that went bad in memory: the request fails on it once, and is computed anew the next time."""
    async with running_engine() as engine:
        await ask(engine, HEALTHY)
        for states in engine._loop._runner._storage.state.recurrent:
            states.fill_(torch.nan)
        with pytest.raises(EngineUnavailableError):
            await ask(engine, HEALTHY)
        assert (await ask(engine, HEALTHY))[1].reuse.cached_tokens == 0
        assert (await ask(engine, HEALTHY))[1].reuse.cached_tokens > 0


async def test_steps_of_nothing_but_such_requests_did_not_work(running_engine):
    async with running_engine() as engine:
        for count in (1, 2, 3):
            with pytest.raises(EngineUnavailableError):
                await ask(engine, poisoned(3, 7))
            assert engine.failures_since_token == count
        assert engine.snapshot().loop_restarts_total == 0
        await engine.try_step()
        assert engine.failures_since_token == 0
