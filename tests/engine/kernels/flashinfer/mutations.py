"""Mistakes that a backend could make in its calls, one at a time, and the check that tells each of them.

Each alters one argument of one function between the backend and the library. The table in docs/cuda-contract.md is this
one, printed by `python -m tests.engine.kernels.flashinfer.mutations`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

from engine.kernels import BatchLayout
from tests.engine.kernels.flashinfer.contract import bind

Arguments: TypeAlias = dict[str, Any]

PREFILL = "BatchPrefillWithPagedKVCacheWrapper"
DECODE = "BatchDecodeWithPagedKVCacheWrapper"
CHUNKS = "chunk_gated_delta_rule"
STEP = "gated_delta_rule_decode_pretranspose"
APPEND = "append_paged_kv_cache"
ROPE = "apply_rope_with_cos_sin_cache_inplace"


@dataclass(frozen=True, slots=True)
class Mutation:
    """`change` gets the call's arguments by name and returns those to call with."""

    mistake: str
    call: str
    """A key of FUNCTIONS, with `.plan` or `.run` for a wrapper's methods; or `plan`, the backend's own: then the
    arguments are the fields of the layout."""
    change: Callable[[Arguments], Arguments]
    caught_by: str
    """A key of CHECKS."""


class MutatedLibrary:
    """A library of which one call is altered."""

    def __init__(self, library: Any, mutation: Mutation) -> None:
        self._library, self._mutation = library, mutation
        self.was_applied = False

    def __getattr__(self, name: str) -> Any:
        function = self._altered(name, getattr(self._library, name))
        if not name.endswith("Wrapper"):
            return function
        return lambda *args, **kwargs: self._wrapper(name, function(*args, **kwargs))

    def _wrapper(self, name: str, wrapper: Any) -> Any:
        for method in ("plan", "run"):
            setattr(wrapper, method, self._altered(f"{name}.{method}", getattr(wrapper, method)))
        return wrapper

    def _altered(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        if name != self._mutation.call:
            return function

        def call(*args: Any, **kwargs: Any) -> Any:
            self.was_applied = True
            arguments = bind(name, (None, *args) if "." in name else args, kwargs)
            arguments.pop("self", None)
            return function(**self._mutation.change(arguments))

        return call


def mutate_plan(kernels: Any, mutation: Mutation) -> None:
    """For a mutation of `plan`: what the backend is told differs from what the check holds it to."""
    plan = kernels.plan

    def altered(layout: BatchLayout) -> None:
        fields = {field.name: getattr(layout, field.name) for field in dataclasses.fields(layout)}
        plan(BatchLayout(**mutation.change(fields)))

    kernels.plan = altered


def put(**changes: Any) -> Callable[[Arguments], Arguments]:
    """Another value for some arguments; a function is given the right one."""

    def change(arguments: Arguments) -> Arguments:
        return {
            **arguments,
            **{
                name: value(arguments[name]) if callable(value) and name in arguments else value
                for name, value in changes.items()
            },
        }

    return change


def swap(first: str, second: str) -> Callable[[Arguments], Arguments]:
    return lambda arguments: {**arguments, first: arguments[second], second: arguments[first]}


def turn(x: torch.Tensor) -> torch.Tensor:
    """The neighbour's, for everyone."""
    return x.roll(1, 0).contiguous()


def halves_swapped(x: torch.Tensor) -> torch.Tensor:
    return torch.cat(x.chunk(2, dim=-1)[::-1], dim=-1)


def swap_last_two(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(-1, -2)


def transposed_rows(name: str) -> Callable[[Arguments], Arguments]:
    """The rows of a pool with their last two dims swapped in place before the call, so that only numbers can tell."""

    def change(arguments: Arguments) -> Arguments:
        pool = arguments[name]
        pool.copy_(pool.transpose(-1, -2).clone())
        return arguments

    return change


def without_end_captures(arguments: Arguments) -> Arguments:
    lengths = arguments["qo_indptr"].diff().tolist()
    kept = [capture for capture in arguments["captures"] if capture.offset_tokens != lengths[capture.sequence]]
    return {**arguments, "captures": tuple(kept)}


def without_grid_captures(arguments: Arguments) -> Arguments:
    lengths = arguments["qo_indptr"].diff().tolist()
    kept = [capture for capture in arguments["captures"] if capture.offset_tokens == lengths[capture.sequence]]
    return {**arguments, "captures": tuple(kept)}


def captures_moved(arguments: Arguments) -> Arguments:
    moved = [replace(capture, destination_slot=capture.destination_slot + 1) for capture in arguments["captures"]]
    return {**arguments, "captures": tuple(moved)}


def without_contexts(arguments: Arguments) -> Arguments:
    """But for the decodes, which cannot be without."""
    has_initial_state = torch.arange(len(arguments["has_initial_state"])) < arguments["num_decodes"]
    return {**arguments, "has_initial_state": has_initial_state}


MUTATIONS = (
    # Pages.
    Mutation("keys and values swapped on their way to the pages", APPEND, swap("append_key", "append_value"), "append"),
    Mutation("positions one further, in the pages", APPEND, put(positions=lambda x: (x + 1).int()), "append"),
    Mutation("each token to the next sequence's pages", APPEND, put(batch_indices=turn), "append"),
    Mutation("page numbers in another order, written", APPEND, put(kv_indices=lambda x: x.flip(0)), "append"),
    Mutation("heads before tokens, written", APPEND, put(kv_layout="HND"), "append"),
    Mutation("heads before tokens, prefill", PREFILL, put(kv_layout="HND"), "attention_of_prefills"),
    Mutation("heads before tokens, decode", DECODE, put(kv_layout="HND"), "attention_of_decodes"),
    # Attention.
    Mutation("a token less in the last page, prefill", f"{PREFILL}.plan",
             put(paged_kv_last_page_len=lambda x: x - 1), "attention_of_prefills"),
    Mutation("a token less in the last page, decode", f"{DECODE}.plan",
             put(last_page_len=lambda x: (x - 1).clamp(min=1)), "attention_of_decodes"),
    Mutation("a full last page, decode", f"{DECODE}.plan",
             put(last_page_len=lambda x: torch.full_like(x, 16)), "attention_of_decodes"),
    Mutation("page numbers in another order, prefill", f"{PREFILL}.plan",
             put(paged_kv_indices=lambda x: x.flip(0)), "attention_of_prefills"),
    Mutation("page numbers in another order, decode", f"{DECODE}.plan",
             put(indices=lambda x: x.flip(0)), "attention_of_decodes"),
    Mutation("without the causal mask", f"{PREFILL}.plan", put(causal=False), "attention_of_prefills"),
    Mutation("another softmax scale, prefill", f"{PREFILL}.plan", put(sm_scale=0.125), "attention_of_prefills"),
    Mutation("another softmax scale, decode", f"{DECODE}.plan", put(sm_scale=0.125), "attention_of_decodes"),
    Mutation("keys and values swapped, read", f"{DECODE}.run",
             put(paged_kv_cache=lambda x: x.flip(1)), "attention_of_decodes"),
    Mutation("query heads in another order", f"{PREFILL}.run", put(q=lambda x: x.flip(1)), "attention_of_prefills"),
    Mutation("queries planned one off", f"{PREFILL}.plan",
             put(qo_indptr=lambda x: torch.cat((x[:1], x[1:-1] + 1, x[-1:]))), "attention"),
    # Pages in fp8.
    Mutation("the scales of keys and values swapped, prefill", f"{PREFILL}.run", swap("k_scale", "v_scale"),
             "fp8_pages"),
    Mutation("the scales of keys and values swapped, decode", f"{DECODE}.run", swap("k_scale", "v_scale"), "fp8_pages"),
    Mutation("the scale of keys dropped", f"{PREFILL}.run", put(k_scale=None), "fp8_pages"),
    Mutation("the scale of values dropped", f"{DECODE}.run", put(v_scale=None), "fp8_pages"),
    Mutation("the scale undone twice", APPEND, put(append_key=lambda x: (x.float() / 0.25).to(x.dtype)), "fp8_pages"),
    # Rotary embedding.
    Mutation("positions one further, rotated", ROPE, put(positions=lambda x: x + 1), "rope"),
    Mutation("pairs instead of halves rotated", ROPE, put(is_neox=False), "rope"),
    Mutation("sines for cosines", ROPE, put(cos_sin_cache=lambda x: halves_swapped(x).contiguous()), "rope"),
    Mutation("half of the dims rotated", ROPE,
             put(cos_sin_cache=lambda x: torch.cat([half[:, ::2] for half in x.chunk(2, 1)], 1)), "rope"),
    Mutation("the last dims rotated, not the first", ROPE, lambda arguments: {
        **arguments, "query": arguments["query"].flip(1), "key": arguments["key"].flip(1)}, "rope"),
    Mutation("keys not rotated", ROPE, put(key=lambda x: x.clone()), "rope"),
    # Norms and activation.
    Mutation("another epsilon", "rmsnorm", put(eps=1e-4), "rms_norm"),
    Mutation("the weight plus one", "rmsnorm", put(weight=lambda x: x + 1), "rms_norm"),
    Mutation("another epsilon, fused", "fused_add_rmsnorm", put(eps=1e-4), "fused_add_rms_norm"),
    Mutation("the residual not updated", "fused_add_rmsnorm", put(residual=lambda x: x.clone()), "fused_add_rms_norm"),
    Mutation("input and residual swapped", "fused_add_rmsnorm", swap("input", "residual"), "fused_add_rms_norm"),
    Mutation("gate and up swapped", "silu_and_mul", put(input=halves_swapped), "silu_and_mul"),
    # The gated delta rule, by chunks.
    Mutation("keys before values in the state, as strides", CHUNKS,
             put(initial_state=swap_last_two, output_state=swap_last_two), "gated_delta_rule_of_prefills"),
    Mutation("keys before values in the state", CHUNKS, transposed_rows("initial_state"),
             "gated_delta_rule_of_prefills"),
    Mutation("the logarithm of the decay", CHUNKS, put(g=lambda x: x.log()), "gated_delta_rule_of_prefills"),
    Mutation("the decay taken for its logarithm", CHUNKS, put(gate_domain="log"), "gated_delta_rule_of_prefills"),
    Mutation("no decay", CHUNKS, put(g=None), "gated_delta_rule_of_prefills"),
    Mutation("beta without its sigmoid", CHUNKS, put(beta=lambda x: torch.logit(x)), "gated_delta_rule_of_prefills"),
    Mutation("beta's sigmoid twice", CHUNKS, put(beta_is_logit=True), "gated_delta_rule_of_prefills"),
    Mutation("queries not scaled", CHUNKS, put(scale=1.0), "gated_delta_rule_of_prefills"),
    Mutation("queries scaled twice", CHUNKS, put(scale=1 / 128), "gated_delta_rule_of_prefills"),
    Mutation("keys not normalised", CHUNKS, put(k=lambda x: x * 1.2), "gated_delta_rule_of_prefills"),
    Mutation("queries and keys swapped", CHUNKS, swap("q", "k"), "gated_delta_rule_of_prefills"),
    Mutation("a fresh sequence starts from what its slot holds", CHUNKS,
             lambda arguments: {**arguments, "state_indices": arguments["output_state_indices"]}, "captures"),
    Mutation("another slot read", CHUNKS, put(state_indices=lambda x: x + 1), "gated_delta_rule_of_prefills"),
    Mutation("another slot written", CHUNKS, put(output_state_indices=lambda x: x + 1), "gated_delta_rule_of_prefills"),
    Mutation("the state not written", CHUNKS, put(output_state_indices=lambda x: torch.full_like(x, -1)),
             "gated_delta_rule_of_prefills"),
    Mutation("captures a chunk early", CHUNKS, put(checkpoint_state_indices=lambda x: x.roll(-1, 0)), "captures"),
    Mutation("captures after every other chunk", CHUNKS, put(checkpoint_every_n_tokens=128), "captures"),
    Mutation("the first sequence's captures for all", CHUNKS, put(checkpoint_cu_starts=torch.zeros_like), "captures"),
    Mutation("sequences cut one off", CHUNKS,
             put(cu_seqlens=lambda x: torch.cat((x[:1], x[1:-1] + 1, x[-1:]))), "captures"),
    # The gated delta rule, token by token.
    Mutation("keys before values in the state, decode", STEP, transposed_rows("initial_state"),
             "gated_delta_rule_of_decodes"),
    Mutation("queries and keys not normalised, decode", STEP, put(use_qk_l2norm=False), "gated_delta_rule_of_decodes"),
    Mutation("queries not scaled, decode", STEP, put(scale=1.0), "gated_delta_rule_of_decodes"),
    Mutation("decay and update gate swapped", STEP, swap("a", "b"), "gated_delta_rule_of_decodes"),
    Mutation("the gate's bias left out", STEP, put(dt_bias=torch.zeros_like), "gated_delta_rule_of_decodes"),
    Mutation("the decay's parameter not a logarithm", STEP, put(A_log=torch.exp), "gated_delta_rule_of_decodes"),
    Mutation("the next sequence's slot", STEP, put(initial_state_indices=turn), "gated_delta_rule_of_decodes"),
    Mutation("the state to another slot, decode", STEP, lambda arguments: {
        **arguments, "output_state_indices": arguments["initial_state_indices"] + 1}, "gated_delta_rule_of_decodes"),
    Mutation("the state not written, decode", STEP, put(initial_state=lambda x: x.clone()),
             "gated_delta_rule_of_decodes"),
    # Products.
    Mutation("the scales of weights not in tiles", "nvfp4_block_scale_interleave",
             put(unswizzled_sf=lambda x: x.roll(1, 0)), "linear"),
    Mutation("the activations' scale the wrong way round", "nvfp4_quantize", put(a_global_sf=torch.reciprocal),
             "linear"),
    Mutation("the global scales left out", "mm_fp4", put(alpha=None), "linear"),
    Mutation("the weights' scale left out", "bmm_fp8", put(B_scale=torch.ones_like), "linear"),
    # What the step is told to be.
    Mutation("captures at a segment's end forgotten", "plan", without_end_captures, "captures"),
    Mutation("tails of the convolution not captured at the end", "plan", without_end_captures, "causal_conv"),
    Mutation("captures on the grid forgotten", "plan", without_grid_captures, "captures"),
    Mutation("a capture to the neighbouring slot", "plan", captures_moved, "captures"),
    Mutation("tails captured to the neighbouring slot", "plan", captures_moved, "causal_conv"),
    Mutation("a fresh convolution reads its slot", "plan", put(has_initial_state=torch.ones_like), "causal_conv"),
    Mutation("a context's state ignored", "plan", without_contexts, "causal_conv"),
    Mutation("the tails of two sequences swapped", "plan", put(state_slots=turn), "causal_conv"),
    # Sampling.
    Mutation("no temperature", "softmax", put(temperature=None), "sample"),
    Mutation("the largest top-k for all rows", "top_k_renorm_probs",
             put(top_k=lambda x: torch.full_like(x, int(x.max()))), "sample"),
    Mutation("another row's top-p", "top_p_renorm_probs", put(top_p=turn), "sample"),
)  # fmt: skip


def table() -> str:
    """As docs/cuda-contract.md holds it."""
    rows = [f"| {m.mistake} | `{m.call}` | `check_{m.caught_by}` |" for m in MUTATIONS]
    return "\n".join(("| mistake | in the call of | told by |", "|---|---|---|", *rows)) + "\n"


if __name__ == "__main__":
    print(table(), end="")
