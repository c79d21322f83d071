"""The check of a CUDA machine, as far as a CPU can run it: what is right is found right, what is broken is found."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from bench.gpu import check as check_command
from bench.gpu.budget import Budget
from bench.gpu.check import SMALL, Check
from bench.gpu.machine import find_machine
from bench.gpu.report import Comparison, Report, Verdict
from bench.gpu.trials import Trial, compare, relative_error
from engine.kernels import UNSCALED
from engine.kernels.flashinfer.backend import FlashinferKernels
from engine.kernels.select import gpu_trouble
from engine.kernels.torch import TorchKernels
from tests.engine.kernels.flashinfer.reference_library import ReferenceLibrary
from tests.engine.kernels.flashinfer.rig import ARCHITECTURES
from tests.engine.kernels.flashinfer.rig import CONFIG as FLASHINFER_CONFIG

CPU = torch.device("cpu")


class HostRecorder:
    """Replays by running the work again, which is what a graph of it does."""

    def warm_up(self, work) -> None:
        work()

    def record(self, work):
        return work

    def free_bytes(self) -> int:
        return 0


def make_check(kernels=None, **changes) -> Check:
    return Check(
        **{
            "machine": find_machine(is_rehearsal=True),
            "scale": SMALL,
            "report": Report(1, Console(quiet=True)),
            "budget": Budget(600),
            "make_candidate": lambda _: kernels or TorchKernels(torch.bfloat16),
            "demo_backend": "",
            **changes,
        }
    )


def wrong(report: Report) -> set[str]:
    return {comparison.what for comparison in report.comparisons if not comparison.is_right}


@pytest.mark.skipif(gpu_trouble() is None, reason="there is a GPU here")
def test_it_ends_well_without_a_gpu_and_says_what_it_left_out(tmp_path, capsys):
    path = tmp_path / "check.json"
    assert check_command.main(["--json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert [skip["section"] for skip in found["skipped"]] == list(check_command.SECTIONS)
    assert all("GPU" in skip["why"] for skip in found["skipped"])
    assert found["machine"]["gpu"] == "none"
    assert found["right"] is None, "nothing was compared"
    assert "not run here: kernels, all of it" in capsys.readouterr().out


def test_a_rehearsal_runs_every_section_but_the_model_and_writes_every_figure(tmp_path):
    path = tmp_path / "check.json"
    sections = [name for name in check_command.SECTIONS if name != "demo"]
    assert check_command.main(["--rehearse", "--seed", "7", "--only", *sections, "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert found["right"]
    assert found["seed"] == 7
    assert {each["section"] for each in found["comparisons"]} == {"kernels", "linear", "copies"}
    assert {each["section"] for each in found["figures"]} == {"speed", "copies"}
    assert all(each["low"] <= each["median"] <= each["high"] for each in found["figures"])


@pytest.mark.parametrize("architecture", ["sm90", "sm100"])
def test_the_flashinfer_backend_is_right_over_the_references(architecture):
    """Every call of the check reaches the backend as it would on a GPU, captured decode steps among them."""
    traits, library = ARCHITECTURES[architecture], ReferenceLibrary(torch.bfloat16)
    config = replace(
        FLASHINFER_CONFIG,
        vocab_size=512,
        intermediate_size=256,
        layer_kinds=SMALL.config.layer_kinds,
        max_position_embeddings=4096,
    )
    check = make_check(
        machine=replace(find_machine(is_rehearsal=True), traits=traits),
        scale=replace(SMALL, config=config, longest=150, load=replace(SMALL.load, formats=("nvfp4",))),
        make_candidate=lambda config: FlashinferKernels(CPU, torch.bfloat16, config, library, traits),
        library=library,
        recorder=HostRecorder(),
    )
    check.run(["kernels", "linear", "speed"])
    # flashinfer lays the weights of its W4A16 out on a GPU alone.
    assert wrong(check.report) <= {"linear: Nvfp4W4A16"}
    assert {"kernels", "prepared", "linear", "speed"} == {each.section for each in check.report.comparisons}
    assert any("graph" in figure.what for figure in check.report.figures)


class NormWithoutWeight(TorchKernels):
    def rms_norm(self, x, weight, eps):
        return super().rms_norm(x, torch.ones_like(weight), eps)

    def fused_add_rms_norm(self, x, residual, weight, eps):
        return super().rms_norm(residual.add_(x), weight, eps)

    def gated_rms_norm(self, x, gate, weight, eps):
        return super().rms_norm(x, weight, eps) * torch.nn.functional.silu(gate)


class ResidualLeftAsItWas(TorchKernels):
    def fused_add_rms_norm(self, x, residual, weight, eps):
        return super().fused_add_rms_norm(x, residual.clone(), weight, eps)


class GateBySigmoid(TorchKernels):
    def gated_rms_norm(self, x, gate, weight, eps):
        return self.rms_norm(x, weight, eps) * gate.sigmoid()


class HalvesSwapped(TorchKernels):
    def silu_and_mul(self, gate_up):
        return super().silu_and_mul(torch.cat(gate_up.chunk(2, dim=-1)[::-1], dim=-1))


class NextRow(TorchKernels):
    def embedding(self, token_ids, table):
        return super().embedding((token_ids + 1) % len(table), table)


class NextPosition(TorchKernels):
    def apply_rope(self, q, k, cos_sin_cache):
        super().apply_rope(q, k, cos_sin_cache.roll(-1, dims=0))


class ValuesForKeys(TorchKernels):
    def append_paged_kv(self, k, v, kv_cache, scales=UNSCALED):
        super().append_paged_kv(v, k, kv_cache, scales)


class PageOfAnother(TorchKernels):
    def append_paged_kv(self, k, v, kv_cache, scales=UNSCALED):
        super().append_paged_kv(k, v, kv_cache, scales)
        used = set(self._plan.layout.kv_indices.tolist())
        other = next(page for page in range(len(kv_cache)) if page not in used)
        kv_cache[other, 0, 0, 0, 0] = 7.0


class ScalesForgotten(TorchKernels):
    def paged_attention(self, q, kv_cache, scale, scales=UNSCALED):
        return super().paged_attention(q, kv_cache, scale, UNSCALED)


class ReadsPastTheEnd(TorchKernels):
    def plan(self, layout):
        full = torch.full_like(layout.kv_last_page_len, layout.page_size)
        super().plan(replace(layout, kv_last_page_len=full))


class TailsLeftAsTheyWere(TorchKernels):
    def causal_conv(self, x, weight, conv_states):
        return super().causal_conv(x, weight, conv_states.clone())


class FirstCaptureForgotten(TorchKernels):
    def plan(self, layout):
        super().plan(replace(layout, captures=layout.captures[1:]))


class StateTransposed(TorchKernels):
    def gated_delta_rule(self, q, k, v, a, b, A_log, dt_bias, states):
        out = super().gated_delta_rule(q, k, v, a, b, A_log, dt_bias, states)
        states.copy_(states.transpose(-1, -2).clone())
        return out


class DecayWithoutBias(TorchKernels):
    def gated_delta_rule(self, q, k, v, a, b, A_log, dt_bias, states):
        return super().gated_delta_rule(q, k, v, a, b, A_log, torch.zeros_like(dt_bias), states)


class NewSequencesGoOnFromTheSlot(TorchKernels):
    def plan(self, layout):
        super().plan(replace(layout, has_initial_state=torch.ones_like(layout.has_initial_state)))


class SecondBest(TorchKernels):
    def sample(self, logits, batch):
        return logits.topk(2).indices[:, 1].cpu()


class TopKIgnored(TorchKernels):
    def sample(self, logits, batch):
        return super().sample(logits, replace(batch, top_k=torch.zeros_like(batch.top_k)))


class RowsDependOnTheBatch(TorchKernels):
    def sample(self, logits, batch):
        return super().sample(logits, replace(batch, seeds=batch.seeds + torch.arange(len(batch.seeds))))


class OneSeedForAll(TorchKernels):
    def sample(self, logits, batch):
        zeros = torch.zeros_like(batch.seeds)
        return super().sample(logits, replace(batch, seeds=zeros, offsets=zeros))


class BiasDropped(TorchKernels):
    def prepare_linear(self, shards):
        return super().prepare_linear([replace(shard, bias=None) for shard in shards])


class ScaleOfTheFirstShard(TorchKernels):
    def prepare_linear(self, shards):
        first = getattr(shards[0], "global_scale", None)
        changed = [replace(each, global_scale=first) if hasattr(each, "global_scale") else each for each in shards]
        return super().prepare_linear(changed)


BROKEN = {
    NormWithoutWeight: {"rms_norm"},
    ResidualLeftAsItWas: {"fused_add_rms_norm"},
    GateBySigmoid: {"gated_rms_norm"},
    HalvesSwapped: {"silu_and_mul"},
    NextRow: {"embedding"},
    NextPosition: {"apply_rope"},
    ValuesForKeys: {"append_paged_kv"},
    PageOfAnother: {"append_paged_kv"},
    ScalesForgotten: {"paged_attention"},
    ReadsPastTheEnd: {"paged_attention"},
    TailsLeftAsTheyWere: {"causal_conv"},
    FirstCaptureForgotten: {"causal_conv", "gated_delta_rule"},
    StateTransposed: {"gated_delta_rule"},
    DecayWithoutBias: {"gated_delta_rule"},
    NewSequencesGoOnFromTheSlot: {"causal_conv", "gated_delta_rule"},
    SecondBest: {"sample"},
    TopKIgnored: {"sample"},
    RowsDependOnTheBatch: {"sample"},
    OneSeedForAll: {"sample"},
    BiasDropped: {"linear: dense"},
    ScaleOfTheFirstShard: {"linear: dense"},
}


@pytest.mark.slow
@pytest.mark.parametrize(("broken", "found"), BROKEN.items(), ids=lambda each: getattr(each, "__name__", ""))
def test_a_broken_kernel_is_called_wrong_and_no_other(broken, found):
    section = "linear" if "linear: dense" in found else "kernels"
    check = make_check(broken(torch.bfloat16))
    check.run([section])
    assert wrong(check.report) == found
    assert check.report.exit_code == 1


class Raises(TorchKernels):
    def silu_and_mul(self, gate_up):
        raise RuntimeError("no kernel image is available")


def test_a_kernel_that_raises_is_wrong_and_the_others_are_still_tried():
    check = make_check(Raises(torch.bfloat16))
    check.run(["kernels"])
    assert wrong(check.report) == {"silu_and_mul"}
    assert "no kernel image" in next(each.detail for each in check.report.comparisons if not each.is_right)
    assert {"sample", "gated_delta_rule"} <= {each.what for each in check.report.comparisons}


def test_a_section_that_breaks_is_wrong_and_the_next_one_runs():
    check = make_check(make_candidate=lambda _: None)
    check.run(["kernels", "copies"])
    assert wrong(check.report) == {"the section itself"}
    assert any(each.section == "copies" and each.is_right for each in check.report.comparisons)


def test_what_is_done_once_for_a_machine_is_not_counted():
    budget = Budget(100, clock=iter([0.0, 150.0, 150.0]).__next__)
    assert budget.is_used
    budget.extend(120.0)
    assert budget.left_seconds == 70.0


def test_what_the_budget_does_not_reach_is_named():
    ticks = iter(range(0, 10**6, 10))
    check = make_check(budget=Budget(300, clock=lambda: next(ticks)))
    check.run(["kernels", "linear", "copies"])
    assert check.report.is_right
    assert 0 < len(check.report.comparisons) < 40
    assert [skip.section for skip in check.report.skips if "budget" in skip.why][-2:] == ["linear", "copies"]


EXPECTED = torch.tensor([[3.0, 4.0], [30.0, 40.0]])


@pytest.mark.parametrize(
    ("found", "error"),
    [
        (EXPECTED, 0.0),
        (EXPECTED + torch.tensor([[0.0, 0.0], [0.0, 5.0]]), 0.1),
        # The small row counts against half of the mean of both norms.
        (EXPECTED + torch.tensor([[0.0, 2.75], [0.0, 0.0]]), 0.2),
        (EXPECTED.clone().fill_(float("nan")), float("inf")),
    ],
)
def test_the_error_is_that_of_the_worst_row(found, error):
    assert relative_error(EXPECTED, found) == pytest.approx(error)


def test_a_value_that_is_missing_or_of_another_shape_is_wrong():
    for left in ({}, {"out": torch.zeros(3)}):
        trial = Trial(
            "a kernel",
            "a case",
            lambda kernels, left=left: {"out": torch.ones(2)} if kernels.dtype == torch.float32 else left,
        )
        assert compare("kernels", trial, TorchKernels(), TorchKernels(torch.bfloat16)).verdict is Verdict.WRONG


def test_the_report_can_be_read_as_json_whatever_is_in_it(tmp_path):
    report = Report(1, Console(quiet=True))
    report.compared(Comparison("kernels", "a kernel", "a case", float("inf"), 1e-2, Verdict.WRONG))
    report.write_json(tmp_path / "check.json")
    found = json.loads((tmp_path / "check.json").read_text())
    assert (found["right"], found["comparisons"][0]["error"]) == (False, "inf")
