"""How fast a period of a 27B hybrid's layers runs here, beside its roofline, and what that makes of the whole model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from bench.gpu.budget import Budget
from bench.gpu.layers import VOCAB, Stack, random_linear, random_stack, state_for, step_layout
from bench.gpu.report import Comparison, Report, Verdict, figure_of
from bench.gpu.roofline import SECTION, Peaks, step_bytes, step_operations
from bench.gpu.shapes import PERIOD
from bench.gpu.timing import seconds_of, seconds_of_each
from bench.gpu.trials import Trial, check_device, judge
from engine.errors import InsufficientMemoryError
from engine.graphs import DecodeGraphs, Recorder
from engine.kernels import BatchLayout, Kernels
from engine.models.config import LayerKind, ModelConfig
from engine.storage import ModelState


@dataclass(frozen=True, slots=True)
class Load:
    """What is timed. Tokens."""

    page_size: int = 64
    batches: tuple[int, ...] = (1, 8)
    decode_context: int = 4096
    prefill_tokens: int = 2048
    prefill_contexts: tuple[int, ...] = (0, 30_720)
    rounds: int = 15
    formats: tuple[str, ...] = ("nvfp4", "fp8", "bf16")
    """Of the weights."""

    @property
    def longest(self) -> int:
        return max(self.decode_context + 8, self.prefill_tokens + max(self.prefill_contexts))


REHEARSAL = Load(page_size=16, batches=(1, 2), decode_context=40, prefill_tokens=70, prefill_contexts=(0, 33), rounds=2)


@torch.inference_mode()
def run_speed(
    config: ModelConfig,
    make_kernels: Callable[[], Kernels],
    peaks: Peaks,
    load: Load,
    report: Report,
    budget: Budget,
    recorder: Recorder | None = None,
) -> None:
    """Each weight format in turn, by kernels of its own; what does not fit is left out, and said. `recorder` captures
    decode steps, CUDA's if it is not given."""
    torch.manual_seed(report.seed)
    head_seconds = _head(config, make_kernels(), load, peaks, report)
    for format_name in load.formats:
        if budget.is_used:
            report.skipped(SECTION, f"{format_name} layers and what follows", budget.why)
            return
        kernels = make_kernels()
        try:
            _run_format(format_name, config, kernels, peaks, load, head_seconds, report, budget, recorder)
        except (torch.OutOfMemoryError, InsufficientMemoryError) as error:
            report.skipped(SECTION, f"{format_name} layers", f"memory: {str(error).splitlines()[0]}")
        if kernels.device.type == "cuda":
            torch.cuda.empty_cache()


def _run_format(
    format_name: str,
    config: ModelConfig,
    kernels: Kernels,
    peaks: Peaks,
    load: Load,
    head_seconds: dict[int, float],
    report: Report,
    budget: Budget,
    recorder: Recorder | None,
) -> None:
    periods = config.num_layers / len(PERIOD)
    stack = random_stack(replace(config, layer_kinds=PERIOD), kernels, format_name, load.longest)
    report.tell(f"  {format_name}: {stack.linear_bytes / 2**20:,.0f} MiB in 4 layers, by {'; '.join(stack.kinds)}")
    state = state_for(stack, max(load.batches), load.longest, load.page_size)
    graphs = _graphs(format_name, stack, state, load, report, recorder)
    if graphs is not None:
        _compare_graphs(format_name, stack, state, graphs, load, report)
    for batch in load.batches:
        if budget.is_used:
            report.skipped(SECTION, f"{format_name}, decode of {batch} and what follows", budget.why)
            return
        step = _decode(format_name, stack, state, graphs, batch, peaks, load, report)
        whole = [periods * each + head_seconds[batch] for each in step]
        report.measured(
            figure_of(
                SECTION,
                f"{format_name}, decode, batch {batch}, {config.num_layers} layers and the head",
                "tokens/s",
                [batch / each for each in whole],
                note=f"extrapolated; context {load.decode_context}",
            )
        )
    for context in load.prefill_contexts:
        if budget.is_used:
            report.skipped(SECTION, f"{format_name}, prefill behind {context} and what follows", budget.why)
            return
        step = _prefill(format_name, stack, state, context, peaks, load, report)
        report.measured(
            figure_of(
                SECTION,
                f"{format_name}, prefill of {load.prefill_tokens} behind {context}, {config.num_layers} layers",
                "tokens/s",
                [load.prefill_tokens / (periods * each) for each in step],
                note="extrapolated, without the head",
            )
        )
    for kind in dict.fromkeys(PERIOD):
        if budget.is_used:
            report.skipped(SECTION, f"{format_name}, {kind} layers by themselves", budget.why)
            return
        _one_kind(format_name, stack.only(kind), peaks, load, report)


def eager_step(
    stack: Stack, state: ModelState, layout: BatchLayout, token_ids: torch.Tensor
) -> Callable[[], torch.Tensor]:
    """A step as the engine runs it without graphs: plan on the host, then the layers and the head."""
    model = stack.model()

    def step() -> torch.Tensor:
        stack.kernels.plan(layout)
        hidden = model.forward(stack.kernels, state, token_ids)
        return model.logits(stack.kernels, hidden[-layout.num_sequences :])

    return step


def graph_step(
    graphs: DecodeGraphs, stack: Stack, layout: BatchLayout, token_ids: torch.Tensor
) -> Callable[[], torch.Tensor]:
    """The same replayed; token ids come from the host, as the engine's do. Raises ValueError where it was not
    captured."""

    def step() -> torch.Tensor:
        stack.kernels.plan(layout)
        logits = graphs.run(layout, token_ids)
        if logits is None:
            raise ValueError(f"a step of {layout.num_sequences} decodes was not captured")
        return logits

    return step


def _graphs(
    format_name: str, stack: Stack, state: ModelState, load: Load, report: Report, recorder: Recorder | None
) -> DecodeGraphs | None:
    """None, and the reason in the report, where steps cannot be captured; where they should be and are not, that is
    wrong."""
    batch = max(load.batches)
    graphs = DecodeGraphs(
        stack.model(),
        stack.kernels,
        state,
        page_size=load.page_size,
        max_batch=batch,
        max_pages=batch * -(-load.longest // load.page_size),
        recorder=recorder,
    )
    graphs.capture()
    if graphs.choice.implementation == "eager":
        what, reason = f"{format_name}, decode steps as CUDA graphs", graphs.choice.reason
        if "failed" in reason:
            report.compared(Comparison(SECTION, what, "", None, None, Verdict.WRONG, reason))
        else:
            report.skipped(SECTION, what, reason or "there are no CUDA graphs on a CPU")
        return None
    report.tell(f"  {graphs.choice.implementation}, {graphs.taken_bytes / 2**20:.0f} MiB")
    return graphs


def _compare_graphs(
    format_name: str, stack: Stack, state: ModelState, graphs: DecodeGraphs, load: Load, report: Report
) -> None:
    """Steps that follow on one another, of changing size and length, replayed and eager, from the same state: a graph
    that kept anything of the step before would show."""
    _fill(state)
    kept = _copy_of(state)
    generator = torch.Generator().manual_seed(0)
    steps = [
        (batch, load.decode_context // 2 + 7 * i, torch.randint(VOCAB, (batch,), generator=generator))
        for i, batch in enumerate((*load.batches, *reversed(load.batches)))
    ]

    def run(is_replayed: bool) -> dict[str, torch.Tensor]:
        _restore(state, kept)
        found: dict[str, torch.Tensor] = {}
        for i, (batch, context, token_ids) in enumerate(steps):
            layout = step_layout(1, context, batch, load.page_size)
            device_ids = token_ids.to(stack.kernels.device)
            step = (
                graph_step(graphs, stack, layout, token_ids)
                if is_replayed
                else eager_step(stack, state, layout, device_ids)
            )
            found[f"logits of step {i}"] = step().float().cpu().clone()
        found["states"] = state.recurrent[0].cpu().clone()
        found["keys and values"] = state.kv[0].float().cpu().clone()
        return found

    trial = Trial("decode step as a graph", f"{format_name}, {len(steps)} steps", lambda _: {})
    report.compared(judge(SECTION, trial, run(False), run(True)))


def _decode(
    format_name: str,
    stack: Stack,
    state: ModelState,
    graphs: DecodeGraphs | None,
    batch: int,
    peaks: Peaks,
    load: Load,
    report: Report,
) -> list[float]:
    """Seconds of a step over the period: replayed where there are graphs."""
    device = stack.kernels.device
    layout = step_layout(1, load.decode_context, batch, load.page_size)
    token_ids = torch.arange(batch) % VOCAB
    works = {"eager": eager_step(stack, state, layout, token_ids.to(device))}
    if graphs is not None:
        works["graph"] = graph_step(graphs, stack, layout, token_ids)
    bound = peaks.seconds(
        step_bytes(stack, 1, load.decode_context, batch), step_operations(stack, 1, load.decode_context, batch)
    )
    taken = seconds_of_each(works, device, rounds=load.rounds)
    for name, seconds in taken.items():
        report.measured(
            figure_of(
                SECTION,
                f"{format_name}, decode step, batch {batch}, 4 layers, {name}",
                "ms",
                [1e3 * each for each in seconds],
                bound=1e3 * bound,
                note=f"context {load.decode_context}",
            )
        )
    return taken["graph" if graphs is not None else "eager"]


def _prefill(
    format_name: str, stack: Stack, state: ModelState, context: int, peaks: Peaks, load: Load, report: Report
) -> list[float]:
    tokens, device = load.prefill_tokens, stack.kernels.device
    layout = step_layout(tokens, context, 1, load.page_size)
    token_ids = (torch.arange(tokens) % VOCAB).to(device)
    seconds = seconds_of(eager_step(stack, state, layout, token_ids), device, rounds=load.rounds)
    bound = peaks.seconds(step_bytes(stack, tokens, context, 1), step_operations(stack, tokens, context, 1))
    report.measured(
        figure_of(
            SECTION,
            f"{format_name}, prefill of {tokens} behind {context}, 4 layers",
            "ms",
            [1e3 * each for each in seconds],
            bound=1e3 * bound,
        )
    )
    return seconds


def _one_kind(format_name: str, stack: Stack, peaks: Peaks, load: Load, report: Report) -> None:
    """A layer with its MLP, from a stack of its kind alone."""
    count = stack.config.num_layers
    kind = "attention" if stack.config.layer_kinds[0] is LayerKind.FULL_ATTENTION else "gated delta net"
    state = state_for(stack, 1, load.longest, load.page_size) if stack.config.num_attention_layers else None
    if state is None:
        state = state_for(stack, 1, load.page_size, load.page_size)
    device, tokens = stack.kernels.device, load.prefill_tokens
    layout = step_layout(tokens, 0, 1, load.page_size)
    if not stack.config.num_attention_layers:
        layout = replace(layout, kv_indices=layout.kv_indices.clamp(max=0))
    token_ids = (torch.arange(tokens) % VOCAB).to(device)
    seconds = seconds_of(eager_step(stack, state, layout, token_ids), device, rounds=load.rounds)
    bound = peaks.seconds(step_bytes(stack, tokens, 0, 1), step_operations(stack, tokens, 0, 1)) / count
    report.measured(
        figure_of(
            SECTION,
            f"{format_name}, prefill of {tokens}, one {kind} layer with its MLP",
            "ms",
            [1e3 * each / count for each in seconds],
            bound=1e3 * bound,
        )
    )


def _head(config: ModelConfig, kernels: Kernels, load: Load, peaks: Peaks, report: Report) -> dict[int, float]:
    """Median seconds of the head, which checkpoints leave in bf16, by batch; 0 where it does not fit."""
    found = dict.fromkeys(load.batches, 0.0)
    try:
        weight = random_linear("bf16", config.vocab_size, config.hidden_size, kernels.device, "lm_head")
        layer = kernels.prepare_linear([weight])
        for batch in load.batches:
            x = kernels.prepare_tensor(torch.randn(batch, config.hidden_size))
            seconds = seconds_of(partial(kernels.linear, x, layer), kernels.device, rounds=load.rounds)
            bound = peaks.seconds(layer.nbytes, 2 * batch * config.vocab_size * config.hidden_size)
            figure = figure_of(
                SECTION, f"head, batch {batch}", "ms", [1e3 * each for each in seconds], bound=1e3 * bound
            )
            report.measured(figure)
            found[batch] = figure.median / 1e3
    except (torch.OutOfMemoryError, InsufficientMemoryError) as error:
        check_device(kernels.device)
        report.skipped(
            SECTION, "the head", f"memory: {str(error).splitlines()[0]}; the whole model is given without it"
        )
    return found


def _fill(state: ModelState) -> None:
    """Small random contents, so that nothing is compared that is zero anyway."""
    for tensor in (*state.kv, *state.conv, *state.recurrent):
        tensor.normal_(std=0.1)


def _copy_of(state: ModelState) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in (*state.kv, *state.conv, *state.recurrent)]


def _restore(state: ModelState, kept: list[torch.Tensor]) -> None:
    for tensor, copy in zip((*state.kv, *state.conv, *state.recurrent), kept, strict=True):
        tensor.copy_(copy)
