"""What a request may ask about its tokens, through the whole engine."""

import pytest

from engine.engine import FinishReason, GenerationRequest, SamplingParams
from engine.errors import RequestError

pytestmark = pytest.mark.anyio

PROMPT = (10, 20, 30, 40)
END = 299


async def answer(engine, **sampling):
    params = SamplingParams(**{"temperature": 0, "max_tokens": 12} | sampling)
    deltas = [delta async for delta in engine.submit(GenerationRequest("r", PROMPT, params))]
    token_ids = [token_id for delta in deltas for token_id in delta.token_ids]
    return token_ids, "".join(delta.text for delta in deltas), deltas


async def test_each_option_changes_the_tokens_as_it_says(running_engine):
    async with running_engine() as engine:
        plain, text, _ = await answer(engine)
        assert (await answer(engine, logit_bias=((65, 100.0),)))[0] == [65] * 12
        banned = plain[3]
        assert banned not in (await answer(engine, logit_bias=((banned, -100.0),)))[0]
        assert len(set((await answer(engine, presence_penalty=2.0, logit_bias=((65, 1.0),), max_tokens=40))[0])) > 1
        # The same bias on every token but a penalty that grows: no token comes twice.
        assert len(set((await answer(engine, frequency_penalty=100.0, max_tokens=40))[0])) == 40
        ended, _, deltas = await answer(engine, logit_bias=((END, 100.0),))
        assert (ended, deltas[-1].finish_reason) == ([], FinishReason.STOP)
        late, _, deltas = await answer(engine, logit_bias=((END, 100.0),), min_tokens=5)
        assert (late, deltas[-1].finish_reason) == (plain[:5], FinishReason.STOP)
        on, _, deltas = await answer(engine, logit_bias=((END, 100.0),), ignore_eos=True)
        assert (on, deltas[-1].finish_reason) == ([END] * 12, FinishReason.LENGTH)
        # A token that the request names ends it all the same.
        _, _, deltas = await answer(engine, logit_bias=((END, 100.0),), ignore_eos=True, stop_token_ids=(END,))
        assert deltas[-1].finish_reason is FinishReason.STOP
        assert text


async def test_a_stop_string_ends_the_answer_and_gives_everything_back(running_engine):
    bias = tuple((token_id, 100.0) for token_id in (65, 66))
    async with running_engine() as engine:
        _, text, _ = await answer(engine, logit_bias=bias, frequency_penalty=3.0, max_tokens=60)
        stop = text[3:7]
        before = text[: text.index(stop)]
        _, cut, deltas = await answer(
            engine, logit_bias=bias, frequency_penalty=3.0, max_tokens=60, stop=("nowhere", stop), logprobs=0
        )
        assert (cut, deltas[-1].finish_reason) == (before, FinishReason.STOP)
        assert deltas[-1].usage.completion_tokens == len(before) + len(stop)
        assert len([each for delta in deltas for each in delta.logprobs]) == len(before)


async def test_log_probabilities_are_the_models_own(running_engine):
    async with running_engine() as engine:
        plain, _, deltas = await answer(engine, logprobs=3)
        records = [record for delta in deltas for record in delta.logprobs]
        assert [record.token_id for record in records] == plain
        assert all(record.top[0] == (record.token_id, record.logprob) for record in records)
        assert all(len(record.top) == 3 for record in records)
        _, _, deltas = await answer(engine, logprobs=3, logit_bias=((65, 100.0),), temperature=0.5, max_tokens=1)
        [biased] = [record for delta in deltas for record in delta.logprobs]
        assert biased.top == records[0].top
        assert biased.token_id == 65


@pytest.mark.parametrize(
    ("options", "param"), [({"logit_bias": ((300, 1.0),)}, "logit_bias"), ({"stop_token_ids": (-1,)}, "stop_token_ids")]
)
async def test_a_token_that_the_model_lacks_is_refused(running_engine, options, param):
    async with running_engine() as engine:
        with pytest.raises(RequestError) as caught:
            engine.submit(GenerationRequest("r", PROMPT, SamplingParams(**options)))
        assert caught.value.param == param
