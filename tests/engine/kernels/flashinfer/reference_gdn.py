"""The gated delta rule behind flashinfer's names: its own references, taken apart where they lack what a kernel has.

Both references keep the recurrence in float32 and round nothing but what they return, which has the dtype of q.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from flashinfer.gdn_kernels.gates import validate_gate_inputs
from flashinfer.gdn_prefill import _validate_slot_args
from flashinfer.trace.templates.gdn import _gdn_decode_paged_reference

from tests.engine.kernels.flashinfer.contract import (
    check_activations,
    check_indices,
    check_template,
    reference,
    require,
    templates,
)

HEAD_DIM = 128
"""The only one that all of flashinfer's prefill kernels have (delta_rule_sm90.py: "only supports D=128")."""
INTEGERS = (torch.int32, torch.int64)


def chunk_gated_delta_rule(
    dtype: torch.dtype,
    *,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    initial_state: torch.Tensor | None,
    output_state: torch.Tensor | None,
    output: torch.Tensor | None,
    output_final_state: bool,
    cu_seqlens: torch.Tensor,
    **rest: Any,
) -> Any:
    """One sequence, and one piece between two checkpoints, at a time through the library's reference."""
    _check_prefill(dtype, q, k, v, initial_state, output_state, output, output_final_state, cu_seqlens, rest)
    indices, write_indices = rest["state_indices"], rest["output_state_indices"]
    every, prefixes = rest["checkpoint_every_n_tokens"], rest["prefix_lens"]
    result = torch.empty(len(q), max(q.shape[1], v.shape[1]), HEAD_DIM, dtype=q.dtype) if output is None else output
    # Read first, written last: a kernel gives no order between its sequences.
    reads = [_read(initial_state, i if indices is None else int(indices[i])) for i in range(len(cu_seqlens) - 1)]
    finals: list[torch.Tensor | None] = []
    for i, (start, end) in enumerate(itertools.pairwise(cu_seqlens.tolist())):
        state, prefix = reads[i], 0 if prefixes is None else int(prefixes[i])
        if start == end:
            finals.append(None)
            continue
        due = [at for at in range(start + 1, end) if every and (prefix + at - start) % every == 0]
        for nth, (first, last) in enumerate(itertools.pairwise([start, *due, end])):
            state = _piece(slice(first, last), q, k, v, state, result, rest)
            if every and (prefix + last - start) % every == 0:
                _keep_checkpoint(state, i, nth, rest)
        finals.append(state)
    if not output_final_state:
        return result
    if output_state is None:
        require(None not in finals, "no reference for an empty sequence without a pool")
        return result, torch.cat([state for state in finals if state is not None])
    rows = write_indices if write_indices is not None else indices
    for i, state in enumerate(finals):
        row = i if rows is None else int(rows[i])
        if row >= 0 and state is not None:
            output_state[row] = state[0].to(output_state.dtype)
    return result, output_state


def _read(pool: torch.Tensor | None, row: int) -> torch.Tensor | None:
    """[1, H, V, K] float32; None for the zero state."""
    return None if pool is None or row < 0 else pool[row : row + 1].float().clone()


def _piece(
    rows: slice,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    state: torch.Tensor | None,
    result: torch.Tensor,
    rest: dict[str, Any],
) -> torch.Tensor:
    """Write the rows' outputs, return the state behind them."""
    count = rows.stop - rows.start
    out, final = reference("chunk_gated_delta_rule", 1)(
        q[rows],
        k[rows],
        v[rows],
        state,
        rest["A_log"],
        None if rest["g"] is None else rest["g"][rows],
        rest["dt_bias"],
        None if rest["beta"] is None else rest["beta"][rows],
        torch.tensor([0, count]),
        rest["scale"],
        gate_domain=rest["gate_domain"],
        use_gate_in_kernel=rest["use_gate_in_kernel"],
        beta_is_logit=rest["beta_is_logit"],
        use_qk_l2norm_in_kernel=rest["use_qk_l2norm_in_kernel"],
        output_final_state=True,
    )
    result[rows] = out
    return final


def _keep_checkpoint(state: torch.Tensor, i: int, nth: int, rest: dict[str, Any]) -> None:
    entry = int(rest["checkpoint_cu_starts"][i]) + nth
    destinations = rest["checkpoint_state_indices"]
    row = entry if destinations is None else int(destinations[entry])
    if row >= 0:
        rest["state_checkpoints"][row] = state[0].to(rest["state_checkpoints"].dtype)


def _check_prefill(
    dtype: torch.dtype,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    initial_state: torch.Tensor | None,
    output_state: torch.Tensor | None,
    output: torch.Tensor | None,
    output_final_state: bool,
    cu_seqlens: torch.Tensor,
    rest: dict[str, Any],
) -> None:
    require(rest["backend"] in ("auto", "flashinfer"), f"no reference for backend={rest['backend']!r}")
    validate_gate_inputs(
        q,
        v,
        rest["g"],
        rest["beta"],
        rest["gate_domain"],
        rest["use_gate_in_kernel"],
        rest["A_log"],
        rest["dt_bias"],
        rest["beta_is_logit"],
    )
    _validate_slot_args(
        q=q,
        cu_seqlens=cu_seqlens,
        output_state=output_state,
        output_final_state=output_final_state,
        cp_chunk_len=rest["_cp_chunk_len"],
        **{
            name: rest[name]
            for name in (
                "state_indices",
                "checkpoint_every_n_tokens",
                "output_state_indices",
                "checkpoint_state_indices",
                "prefix_lens",
                "backend",
                "use_cp",
            )
        },
    )
    heads, sequences = max(q.shape[1], v.shape[1]), len(cu_seqlens) - 1
    check_template(
        templates("chunk_gated_delta_rule")[1],
        {**rest, "q": q, "k": k, "v": v, "cu_seqlens": cu_seqlens, "a": rest["g"], "b": rest["beta"], "scale": None},
    )
    check_activations(dtype, q=q, k=k, v=v, output=output)
    for name, tensor in {"q": q, "k": k, "v": v, "output": output, "g": rest["g"], "beta": rest["beta"]}.items():
        require(tensor is None or tensor.is_contiguous(), f"{name} must be contiguous")
    for name in ("g", "beta"):
        is_raw = rest["use_gate_in_kernel" if name == "g" else "beta_is_logit"]
        require(rest[name] is None or is_raw or rest[name].dtype == torch.float32, f"{name} must be float32")
    require(q.shape[2] == v.shape[2] == HEAD_DIM, f"head sizes {q.shape[2]} and {v.shape[2]} are not {HEAD_DIM}")
    check_indices(
        dtypes=INTEGERS,
        cu_seqlens=cu_seqlens,
        **{name: rest[name] for name in ("state_indices", "output_state_indices", "checkpoint_state_indices")},
    )
    lengths = cu_seqlens.diff()
    require(int(cu_seqlens[0]) == 0 and bool((lengths >= 0).all()), f"cu_seqlens {cu_seqlens.tolist()}")
    indexed = rest["state_indices"] is not None
    for name, pool in {"initial_state": initial_state, "output_state": output_state}.items():
        if pool is not None:
            require(pool.dtype == torch.float32, f"{name} is {pool.dtype}: the state is kept in float32")
            require(tuple(pool.shape[1:]) == (heads, HEAD_DIM, HEAD_DIM), f"{name} has shape {tuple(pool.shape)}")
            require(indexed or (len(pool) == sequences and pool.is_contiguous()), f"{name} must be packed")
            require(pool.stride(-1) == 1, f"{name} must have K last")
    require(not indexed or not output_final_state or output_state is not None, "a pool must be given to write to")
    _check_rows(sequences, initial_state, output_state, rest)
    _check_checkpoints(sequences, heads, lengths, rest)


def _check_rows(
    sequences: int, initial_state: torch.Tensor | None, output_state: torch.Tensor | None, rest: dict[str, Any]
) -> None:
    """Preconditions that no kernel checks: rows inside the pools, and none that two sequences write."""
    reads, writes, checkpoints = (
        rest[name] for name in ("state_indices", "output_state_indices", "checkpoint_state_indices")
    )
    if reads is not None and initial_state is not None:
        lowest = 0 if writes is None else -1
        require(bool(((reads >= lowest) & (reads < len(initial_state))).all()), f"state_indices {reads.tolist()}")
    written = writes if writes is not None else reads
    rows = [] if written is None or output_state is None else [row for row in written.tolist() if row >= 0]
    if checkpoints is not None and rest["state_checkpoints"] is not None:
        kept = [row for row in checkpoints.tolist() if row >= 0]
        require(all(row < len(rest["state_checkpoints"]) for row in kept), f"checkpoint rows {kept}")
        is_one_pool = output_state is not None and rest["state_checkpoints"].data_ptr() == output_state.data_ptr()
        rows = [*rows, *kept] if is_one_pool else kept
    require(len(set(rows)) == len(rows), f"rows written twice: {sorted(rows)}")
    read = set() if reads is None or initial_state is None else set(reads.tolist())
    own = set() if reads is None or written is None else set(zip(reads.tolist(), written.tolist(), strict=True))
    for row in read & set(rows):
        require((row, row) in own or row < 0, f"row {row} is read by one sequence and written by another")


def _check_checkpoints(sequences: int, heads: int, lengths: torch.Tensor, rest: dict[str, Any]) -> None:
    every, pool, starts = (
        rest[name] for name in ("checkpoint_every_n_tokens", "state_checkpoints", "checkpoint_cu_starts")
    )
    require(every >= 0 and every % 64 == 0, f"checkpoint_every_n_tokens={every} is no multiple of 64")
    require((every > 0) == (pool is not None) == (starts is not None), "checkpoints need a pool, starts and a distance")
    if not every:
        return
    require(tuple(pool.shape[1:]) == (heads, HEAD_DIM, HEAD_DIM), f"state_checkpoints has shape {tuple(pool.shape)}")
    require(pool.dtype == torch.float32 and pool[0].is_contiguous(), "state_checkpoints must have dense float32 rows")
    check_indices(dtypes=INTEGERS, checkpoint_cu_starts=starts)
    is_indexed = rest["checkpoint_state_indices"] is not None
    allowed = (sequences, sequences + 1) if is_indexed else (sequences + 1,)
    require(len(starts) in allowed, f"checkpoint_cu_starts has {len(starts)} entries for {sequences} sequences")
    prefixes = torch.zeros_like(lengths) if rest["prefix_lens"] is None else rest["prefix_lens"]
    counts = (prefixes + lengths) // every - prefixes // every
    if not is_indexed:
        require(starts.diff().tolist() == counts.tolist(), f"checkpoint_cu_starts {starts.tolist()}")
        require(len(pool) >= int(starts[-1]), f"{len(pool)} rows for {int(starts[-1])} checkpoints")
    else:
        last = [int(start) + int(count) for start, count in zip(starts, counts, strict=False)]
        require(max(last) <= len(rest["checkpoint_state_indices"]), "more checkpoints than checkpoint_state_indices")


def gated_delta_rule_decode_pretranspose(
    dtype: torch.dtype,
    *,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    state: torch.Tensor | None,
    A_log: torch.Tensor,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    b: torch.Tensor,
    scale: float | None,
    output: torch.Tensor | None,
    use_qk_l2norm: bool,
    initial_state: torch.Tensor | None,
    initial_state_indices: torch.Tensor | None,
    output_state_indices: torch.Tensor | None,
    intermediate_states_buffer: torch.Tensor | None,
    disable_state_update: bool,
    backend: str,
) -> Any:
    """The reference of the paged decode, which is the one that has the norm of q and k in it, on a pool of one row."""
    require(backend in ("auto", "flashinfer"), f"no reference for backend={backend!r}")
    require(q.shape[1] == 1, f"decode takes one token, got {q.shape[1]}")
    require(intermediate_states_buffer is None and not disable_state_update, "for more tokens than one")
    check_template(
        templates("gated_delta_rule_decode_pretranspose")[0],
        {"q": q, "k": k, "v": v, "state": state, "A_log": A_log, "a": a, "dt_bias": dt_bias, "b": b},
    )
    check_activations(dtype, q=q, k=k, v=v, output=output)
    for name, gate in {"a": a, "b": b}.items():
        require(gate.dtype == dtype, f"{name} must be {dtype}, got {gate.dtype}")
    K, V = q.shape[3], v.shape[3]
    require(K >= HEAD_DIM and V >= HEAD_DIM and V % 8 == 0, f"K={K}, V={V}: at least {HEAD_DIM} each")
    require(A_log.dtype == torch.float32, f"A_log is {A_log.dtype}, must be float32")
    require(dt_bias.dtype in (torch.float32, torch.bfloat16), f"dt_bias is {dt_bias.dtype}")
    pool = state if initial_state is None else initial_state
    require((initial_state is None) == (initial_state_indices is None), "a pool and its indices come together")
    require(initial_state is not None or output_state_indices is None, "output_state_indices need a pool")
    assert pool is not None
    require(pool.dtype == torch.float32, f"the state is {pool.dtype}, must be float32")
    require(tuple(pool.shape[1:]) == (v.shape[2], V, K), f"the state has shape {tuple(pool.shape)}")
    require(pool.stride(-1) == 1 and pool.stride(0) % 4 == 0, f"the state has strides {pool.stride()}")
    check_indices(dtypes=INTEGERS, initial=initial_state_indices, output=output_state_indices)
    reads = list(range(len(q))) if initial_state_indices is None else initial_state_indices.tolist()
    writes = reads if output_state_indices is None else output_state_indices.tolist()
    require(len(reads) == len(writes) == len(q), f"{len(q)} tokens, {len(reads)} rows to read, {len(writes)} to write")
    used = [row for row in writes if row >= 0]
    require(len(set(used)) == len(used), f"rows written twice: {used}")
    require(all(-1 <= row < len(pool) for row in (*reads, *writes)), f"rows {reads}, {writes} of {len(pool)}")
    result = torch.zeros(*v.shape, dtype=q.dtype) if output is None else output
    table = {"page_indices": torch.tensor([0]), "page_indptr": torch.tensor([0, 1]), "last_page_len": torch.tensor([2])}
    states = [pool[row : row + 1].clone() if row >= 0 else None for row in reads]
    for i, own in enumerate(states):
        if own is None:
            result[i] = 0.0
            continue
        row = slice(i, i + 1)
        out, _ = _gdn_decode_paged_reference(
            q[row], k[row], v[row], A_log, a[row], dt_bias, b[row], scale,
            use_qk_l2norm=use_qk_l2norm, state_pool=own, **table,
        )  # fmt: skip
        result[row] = out
        if writes[i] >= 0:
            pool[writes[i]] = own[0]
    return result, pool
