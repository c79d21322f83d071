"""The trainer: the fast forward pass is transformers', a few steps learn, a restart changes nothing."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

from engine.weights.nvfp4 import dequantize_nvfp4, quantize_nvfp4
from training.demo.config import DemoConfig, ModelShape, TrainPlan
from training.demo.delta_rule import chunk_gated_delta_rule
from training.demo.fake_quant import quantised, quantised_groups, round_to_nvfp4
from training.demo.model import FastForward, build_config, build_model
from training.demo.rows import Encoder, Rows
from training.demo.tokenizer import load_tokenizer
from training.demo.train import Trainer, learning_rate_share

SMALL = ModelShape(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=4,
    head_dim=32,
    linear_key_head_dim=32,
    linear_value_head_dim=32,
)
PLAN = TrainPlan(
    row_tokens=128, rows_per_step=2, steps=40, warmup_steps=2, long_row_tokens=256, quantised_from=1.0, long_from=1.0
)


@pytest.mark.parametrize(("tokens", "chunk"), [(1, 64), (64, 64), (200, 64), (130, 32)])
def test_chunked_rule_and_its_gradients_agree_with_transformers(tokens: int, chunk: int) -> None:
    torch.manual_seed(tokens)
    shapes = [(2, tokens, 2, 16), (2, tokens, 2, 16), (2, tokens, 4, 24)]
    given = [torch.randn(shape).requires_grad_() for shape in shapes]
    given += [(-torch.rand(2, tokens, 4) * 0.3).requires_grad_(), torch.rand(2, tokens, 4).requires_grad_()]
    start = torch.randn(2, 4, 16, 24)
    options = {"chunk_size": chunk, "initial_state": start, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    ours, our_state = chunk_gated_delta_rule(*given, **options)
    weights = torch.randn_like(ours)
    our_gradients = torch.autograd.grad((ours * weights).sum() + our_state.square().sum(), given)
    theirs, their_state = torch_chunk_gated_delta_rule(*given, **options)
    their_gradients = torch.autograd.grad((theirs * weights).sum() + their_state.square().sum(), given)
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(our_state, their_state, atol=2e-5, rtol=1e-4)
    for our, their in zip(our_gradients, their_gradients, strict=True):
        torch.testing.assert_close(our, their, atol=2e-4, rtol=1e-3)


def test_fast_forward_has_the_loss_of_transformers() -> None:
    model = build_model(build_config(SMALL, [2, 0], 0), seed=1)
    tokens = torch.randint(0, 4096, (2, 100), generator=torch.Generator().manual_seed(0))
    targets = tokens.roll(-1, dims=1)
    weights = torch.ones_like(tokens, dtype=torch.float32)
    weights[:, -1] = 0
    with torch.no_grad():
        ours = FastForward(model, compiled=False).loss(tokens, targets, weights) / weights.sum()
        theirs = model(input_ids=tokens, labels=tokens).loss
    assert float(ours) == pytest.approx(float(theirs), abs=2e-2)


def test_three_steps_lower_the_loss(tmp_path) -> None:
    trainer = Trainer(DemoConfig(SMALL, dataclasses.replace(PLAN, warmup_steps=1)), tmp_path, compiled=False)
    losses = [trainer.train_step() for _ in range(4)]
    assert losses[-1] < losses[0]


def test_a_resumed_run_goes_on_as_if_never_stopped(tmp_path) -> None:
    config = DemoConfig(SMALL, PLAN)
    straight = Trainer(config, tmp_path / "a", compiled=False)
    losses = [straight.train_step() for _ in range(4)]
    stopped = Trainer(config, tmp_path / "b", compiled=False)
    first = [stopped.train_step() for _ in range(2)]
    stopped.save()
    resumed = Trainer(config, tmp_path / "b", compiled=False)
    assert resumed.resume()
    assert [*first, *(resumed.train_step() for _ in range(2))] == pytest.approx(losses, rel=1e-4)


def test_fake_quantisation_shows_what_the_quantiser_writes_and_leaves_the_weights() -> None:
    model = build_model(build_config(SMALL, [2, 0], 0), seed=1)
    groups = quantised_groups(model)
    before = [parameter.detach().clone() for group in groups for parameter in group]
    alone = next(group for group in groups if len(group) == 1)
    with quantised(groups):
        expected = dequantize_nvfp4(
            quantize_nvfp4(before[[id(p) for g in groups for p in g].index(id(alone[0]))].bfloat16())
        )
        assert torch.equal(alone[0].data, expected)
    after = [parameter.detach() for group in groups for parameter in group]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_matrices_that_share_a_scale_are_rounded_with_the_larger_maximum() -> None:
    small, large = torch.randn(8, 32), torch.randn(8, 32) * 10
    rounded = round_to_nvfp4([small, large])
    amax = large.bfloat16().abs().max().float()
    assert torch.equal(rounded[0], dequantize_nvfp4(quantize_nvfp4(small.bfloat16(), amax=amax)))


def test_rows_hold_whole_chats_and_weigh_the_assistant() -> None:
    encoder = Encoder(load_tokenizer(), PLAN)
    tokens, targets, weights = Rows(encoder, seed=1, length=512).batch(4)
    assert tokens.shape == targets.shape == weights.shape == (4, 512)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert (tokens[:, 0] == encoder.start).all()
    assert {round(weight, 3) for weight in weights.unique().tolist()} <= {0.0, 0.1, 0.3, 1.0}
    assert 0.2 < float((weights == 1.0).float().mean()) < 0.8


def test_learning_rate_warms_up_stays_and_falls() -> None:
    plan = TrainPlan(steps=1000, warmup_steps=10, decay_from=0.5, final_lr_share=0.1)
    shares = [learning_rate_share(plan, step) for step in (0, 9, 400, 750, 1000)]
    assert shares == pytest.approx([0.1, 1.0, 1.0, 0.55, 0.1])
