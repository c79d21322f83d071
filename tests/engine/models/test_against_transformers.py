"""The oracle: every architecture against Hugging Face transformers, float32, random weights."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from engine.kernels.select import select_kernels
from engine.models.registry import load_model
from tests.engine.models.cases import MAIN, VARIANTS
from tests.engine.models.driver import Driver, Sequence, make_twin

MAX_ABS_DIFFERENCE = 1e-3
# Two logits closer than this are a tie that rounding may decide either way: about one in 20,000 random rows has one.
NEAR_TIE = 2e-4
DECODE_STEPS = 32
BATCH = 8
# Around the borders of pages (16), chunks (64) and of pages within chunks.
BORDERS = (1, 2, 15, 16, 17, 48, 63, 64, 65, 80, 127, 128, 129, 191, 192, 193, 511, 512, 513, 639, 640, 641, 700)


@pytest.mark.parametrize("name", MAIN)
def test_logits_and_greedy_tokens_are_those_of_transformers(name, tmp_path):
    _compare(MAIN[name](), tmp_path, num_prompts=40, decode_steps=16)


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_match_transformers(name, tmp_path):
    _compare(VARIANTS[name](), tmp_path, num_prompts=8, decode_steps=8, shards=3)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*MAIN, *VARIANTS])
def test_two_hundred_prompts_match_transformers(name, tmp_path, capsys):
    config = (MAIN | VARIANTS)[name]()
    largest = _compare(config, tmp_path, num_prompts=200, decode_steps=DECODE_STEPS, shards=2)
    with capsys.disabled():
        print(f"\n{name}: largest absolute difference {largest:.2e}")


def _compare(config, folder, *, num_prompts, decode_steps, shards=1) -> float:
    """Run prompts in mixed batches, some whole and some in random pieces, then decode greedily; returns the largest
    difference. The twin reads each prompt and its continuation once, so equal argmaxes mean equal greedy tokens."""
    twin = make_twin(config, folder, seed=11, shards=shards)
    model = load_model(folder, kernels := select_kernels("torch"))
    rng = random.Random(7)
    lengths = [*BORDERS, *(rng.randint(1, 700) for _ in range(num_prompts))]
    rng.shuffle(lengths)
    largest = 0.0
    for first in range(0, num_prompts, BATCH):
        prompts = [[rng.randrange(256) for _ in range(n)] for n in lengths[first : first + BATCH]]
        driver = Driver(model, kernels, num_pages=8 * 50, page_size=16, seed=first, adjacent=rng.random() < 0.3)
        ours = _generate(driver, prompts, decode_steps, rng)
        for prompt, (logits, tokens) in zip(prompts, ours, strict=True):
            with torch.no_grad():
                theirs = twin(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :]
            difference = (logits - theirs).abs().max().item()
            assert difference <= MAX_ABS_DIFFERENCE, f"prompt of {len(prompt)} tokens"
            lead = theirs.max(-1).values - theirs.gather(-1, torch.tensor(tokens)[:, None]).squeeze(-1)
            assert (lead <= NEAR_TIE).all(), f"prompt of {len(prompt)} tokens: another greedy token"
            largest = max(largest, difference)
    return largest


def _generate(driver, prompts, decode_steps, rng) -> list[tuple[torch.Tensor, list[int]]]:
    """For each prompt the logits [decode_steps + 1, vocab] after it and after each greedy token, and these tokens."""
    pieces: list[list[list[int]]] = [_split(prompt, rng) for prompt in prompts]
    sequences: list[Sequence] = [driver.open() for _ in prompts]
    logits: list[list[torch.Tensor]] = [[] for _ in prompts]
    while any(len(rows) <= decode_steps for rows in logits):
        work = []
        for i, rows in enumerate(logits):
            if pieces[i]:
                work.append((i, pieces[i].pop(0)))
            elif len(rows) <= decode_steps:
                work.append((i, [int(rows[-1].argmax())]))
        # Decodes first, as the layout asks; a first piece of one token is no decode.
        work.sort(key=lambda item: len(item[1]) > 1 or sequences[item[0]].length == 0)
        rows = driver.step([(sequences[i], tokens) for i, tokens in work])
        for (i, _), row in zip(work, rows, strict=True):
            if not pieces[i]:
                logits[i].append(row)
    return [(torch.stack(rows), [int(row.argmax()) for row in rows]) for rows in logits]


def _split(prompt: list[int], rng: random.Random) -> list[list[int]]:
    """The prompt whole, or in up to five pieces."""
    cuts = sorted(rng.randrange(1, len(prompt)) for _ in range(rng.choice((0, 0, 1, 2, 4)))) if len(prompt) > 1 else []
    edges = [0, *sorted(set(cuts)), len(prompt)]
    return [prompt[start:end] for start, end in itertools.pairwise(edges)]
