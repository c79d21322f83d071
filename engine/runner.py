"""Runs one step: a StepPlan to the kernels' batch layout, through the model, to one token for each sampled request;
then its copies."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import torch

from cache import Fault, Faults, Tier
from engine.errors import FireDrillError
from engine.kernels import BatchLayout, Kernels, SamplingBatch, StateCapture
from engine.logits import read_logprobs
from engine.models.registry import Model
from engine.plan import CopyBatch, CopyOutcome, Segment, StepPlan, StepResult
from engine.storage import Storage

SLOW_STEP_SECONDS = 0.2
"""How much longer a step takes in the fire drill of that name."""


class Runner:
    """Owns the model's state and host memory. Mutable: `run` belongs to the engine thread."""

    def __init__(
        self, model: Model, kernels: Kernels, storage: Storage, page_size: int, faults: Faults | None = None
    ) -> None:
        self._model = model
        self._kernels = kernels
        self._storage = storage
        self._page_size = page_size
        self._faults = Faults() if faults is None else faults

    @property
    def backend_name(self) -> str:
        return self._kernels.name

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Copy within the device what is resumed, compute the plan's tokens, leave their KV and state behind, and pick
        tokens; then copy to and from host memory.

        Raises what the model raises; a copy to or from host memory that fails only shows in the result.
        """
        result = self._compute(plan) if plan.segments else StepResult({})
        return replace(result, copied={batch.number: self._copy(batch) for batch in plan.background})

    def _compute(self, plan: StepPlan) -> StepResult:
        self._hold_drills()
        started = time.perf_counter()
        self._storage.run(plan.resumes)
        resumed = time.perf_counter()
        result = self._sample(plan)
        return replace(result, resume_seconds=resumed - started, compute_seconds=time.perf_counter() - resumed)

    def _sample(self, plan: StepPlan) -> StepResult:
        segments = plan.segments
        lengths = np.array([len(segment.token_ids) for segment in segments], np.int32)
        layout = build_layout(plan, lengths, self._page_size)
        self._kernels.plan(layout)
        token_ids = np.concatenate([np.array(segment.token_ids, np.int64) for segment in segments])
        hidden = self._model.forward(
            self._kernels, self._storage.state, torch.from_numpy(token_ids).to(self._kernels.device)
        )
        sampled = [index for index, segment in enumerate(segments) if segment.is_sampled]
        if not sampled:
            return StepResult({})
        if len(sampled) < len(hidden):
            last_rows = layout.qo_indptr[1:].to(torch.int64)[sampled] - 1
            hidden = hidden[last_rows.to(hidden.device)]
        return self._pick(self._model.logits(self._kernels, hidden), [segments[index] for index in sampled])

    def _pick(self, logits: torch.Tensor, segments: list[Segment]) -> StepResult:
        """One token for each of `segments` from its row of logits, which may be changed."""
        asking = [row for row, segment in enumerate(segments) if segment.sampling.logprobs is not None]
        logprobs = logits[asking].float().log_softmax(dim=-1) if asking else None
        for row, segment in enumerate(segments):
            if segment.edits is not None:
                segment.edits.apply(logits[row])
        picked = self._kernels.sample(logits, build_sampling(segments)).tolist()
        token_of = {segment.request_id: token for segment, token in zip(segments, picked, strict=True)}
        if logprobs is None:
            return StepResult(token_of)
        top_counts = [segments[row].sampling.logprobs or 0 for row in asking]
        records = read_logprobs(logprobs, [picked[row] for row in asking], top_counts)
        record_of = {segments[row].request_id: record for row, record in zip(asking, records, strict=True)}
        return StepResult(token_of, record_of)

    def _copy(self, batch: CopyBatch) -> CopyOutcome:
        started = time.perf_counter()
        try:
            if Fault.RESTORE_FAIL in self._faults and batch.copies[0].source.tier is not Tier.DEVICE:
                raise FireDrillError(Fault.RESTORE_FAIL)
            self._storage.run(batch.copies)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is logged and costs this batch's request only
            return CopyOutcome(time.perf_counter() - started, error)
        return CopyOutcome(time.perf_counter() - started)

    def _hold_drills(self) -> None:
        if Fault.SLOW_STEP in self._faults:
            time.sleep(SLOW_STEP_SECONDS)
        if Fault.STEP_FAIL in self._faults:
            raise FireDrillError(Fault.STEP_FAIL)


def build_layout(plan: StepPlan, lengths: np.ndarray, page_size: int) -> BatchLayout:
    """The plan as host tensors; `lengths` [B] are the segments' token counts."""
    segments = plan.segments
    starts = np.array([segment.start for segment in segments], np.int32)
    ends = starts + lengths
    page_counts = np.array([len(segment.page_ids) for segment in segments], np.int32)
    return BatchLayout(
        num_decodes=sum(segment.is_decode for segment in segments),
        qo_indptr=_indptr(lengths),
        kv_indptr=_indptr(page_counts),
        kv_indices=torch.from_numpy(np.concatenate([segment.page_ids for segment in segments])),
        kv_last_page_len=torch.from_numpy((ends - 1) % page_size + 1),
        positions=_positions(starts, lengths),
        state_slots=torch.from_numpy(np.array([segment.state_slot for segment in segments], np.int32)),
        has_initial_state=torch.from_numpy(starts > 0),
        page_size=page_size,
        captures=tuple(
            StateCapture(index, len(segment.token_ids), segment.capture_slot)
            for index, segment in enumerate(segments)
            if segment.capture_slot is not None
        ),
    )


def build_sampling(segments: list[Segment]) -> SamplingBatch:
    """How to pick a token after each of `segments`."""
    params = [segment.sampling for segment in segments]
    return SamplingBatch(
        temperature=torch.tensor([each.temperature for each in params], dtype=torch.float32),
        top_k=torch.tensor([each.top_k for each in params], dtype=torch.int32),
        top_p=torch.tensor([each.top_p for each in params], dtype=torch.float32),
        min_p=torch.tensor([each.min_p for each in params], dtype=torch.float32),
        seeds=torch.tensor([each.seed or 0 for each in params], dtype=torch.int64),
        offsets=torch.tensor([segment.end for segment in segments], dtype=torch.int64),
    )


def _indptr(counts: np.ndarray) -> torch.Tensor:
    indptr = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=indptr[1:])
    return torch.from_numpy(indptr)


def _positions(starts: np.ndarray, lengths: np.ndarray) -> torch.Tensor:
    """starts[0], starts[0] + 1, ...: each segment's positions, one after the other."""
    firsts = np.cumsum(lengths) - lengths
    return torch.from_numpy(
        np.repeat(starts - firsts, lengths).astype(np.int32) + np.arange(lengths.sum(), dtype=np.int32)
    )
