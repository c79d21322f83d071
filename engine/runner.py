"""Runs one step: a StepPlan to the kernels' batch layout, through the model, to one token for each sampled request;
then its copies."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from itertools import chain

import numpy as np
import torch

from cache import Fault, Faults
from engine.copier import Copier, ImmediateCopier
from engine.errors import FireDrillError, NonFiniteLogitsError
from engine.graphs import DecodeGraphs
from engine.kernels import BatchLayout, Kernels, SamplingBatch, StateCapture
from engine.logits import read_logprobs
from engine.models.registry import Model
from engine.plan import Segment, StepPlan, StepResult
from engine.storage import Storage
from engine.uploads import upload

SLOW_STEP_SECONDS = 0.2
"""How much longer a step takes in the fire drill of that name."""

logger = logging.getLogger("dalsegno.engine")


class Runner:
    """Owns the model's state and host memory. Mutable: `run` belongs to the engine thread.

    Between the moment a step is queued and the one its tokens are read, nothing waits for the device: what the host has
    to do for the step, copies to and from host memory among it, is done while the device computes.
    """

    def __init__(
        self,
        model: Model,
        kernels: Kernels,
        storage: Storage,
        page_size: int,
        faults: Faults | None = None,
        *,
        copier: Copier | None = None,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        """Without `copier`, copies to and from host memory come after each step's tokens; without `graphs`, all steps
        run eagerly."""
        self._model = model
        self._kernels = kernels
        self._storage = storage
        self._page_size = page_size
        self._faults = Faults() if faults is None else faults
        self._copier = ImmediateCopier(storage.run, self._faults) if copier is None else copier
        self._graphs = graphs

    @property
    def backend_name(self) -> str:
        return self._kernels.name

    @property
    def is_on_cpu(self) -> bool:
        return self._kernels.device.type == "cpu"

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Copy within the device what is resumed, compute the plan's tokens, leave their KV and state behind, and pick
        tokens; copies to and from host memory run beside that, or after it.

        Raises what the model raises, and then no copy is under way any more; a copy to or from host memory that fails
        only shows in the result.
        """
        try:
            self._copier.prepare(plan.under_way)
            if plan.segments:
                result = self._compute(plan)
            else:
                result = StepResult({})
                self._copier.start(plan.background)
            computed = time.perf_counter()
            report = self._copier.finish(waits=not plan.segments)
        except Exception:
            self._copier.abandon()
            raise
        copy_seconds = time.perf_counter() - computed
        return replace(result, copy_seconds=copy_seconds, copied=report.copied, under_way=report.under_way)

    @torch.inference_mode()
    def close(self) -> None:
        """Wait until nothing is copied any more, given up or not: then the memory may be given back."""
        self._copier.abandon()

    def _compute(self, plan: StepPlan) -> StepResult:
        self._hold_drills()
        started = time.perf_counter()
        self._storage.queue(plan.resumes)
        resumed = time.perf_counter()
        logits = self._queue(plan)
        self._copier.start(plan.background)
        result = StepResult({}) if logits is None else self._pick(logits, [s for s in plan.segments if s.is_sampled])
        if logits is None:
            self._wait_for_device()
        return replace(result, resume_seconds=resumed - started, compute_seconds=time.perf_counter() - resumed)

    def _queue(self, plan: StepPlan) -> torch.Tensor | None:
        """The step's work, up to a row of logits for each segment that is sampled; None where there is none."""
        segments, device = plan.segments, self._kernels.device
        lengths = np.array([len(segment.token_ids) for segment in segments], np.int32)
        layout = build_layout(plan, lengths, self._page_size)
        token_ids = torch.from_numpy(np.fromiter(chain.from_iterable(s.token_ids for s in segments), np.int64))
        sampled = [index for index, segment in enumerate(segments) if segment.is_sampled]
        self._kernels.plan(layout)
        logits = None if self._graphs is None else self._graphs.run(layout, token_ids)
        if logits is not None:
            return _rows(logits, sampled) if sampled else None
        hidden = self._model.forward(self._kernels, self._storage.state, upload(token_ids, device))
        if not sampled:
            return None
        last_rows = (layout.qo_indptr[1:] - 1).tolist()
        return self._model.logits(self._kernels, _rows(hidden, [last_rows[index] for index in sampled]))

    def _pick(self, logits: torch.Tensor, segments: list[Segment]) -> StepResult:
        """One token for each of `segments` from its row of logits, which may be changed. A row that is not finite costs
        its own request alone."""
        asking = [row for row, segment in enumerate(segments) if segment.sampling.logprobs is not None]
        logprobs = _rows(logits, asking).float().log_softmax(dim=-1) if asking else None
        for row, segment in enumerate(segments):
            if segment.edits is not None:
                segment.edits.apply(logits[row])
        picked, refused = self._sample(logits, segments)
        token_of = {segments[row].request_id: token for row, token in picked.items()}
        not_finite = frozenset(segments[row].request_id for row in refused)
        answered = [place for place, row in enumerate(asking) if row in picked]
        if logprobs is None or not answered:
            return StepResult(token_of, not_finite=not_finite)
        rows = [asking[place] for place in answered]
        top_counts = [segments[row].sampling.logprobs or 0 for row in rows]
        records = read_logprobs(_rows(logprobs, answered), [picked[row] for row in rows], top_counts)
        record_of = {segments[row].request_id: record for row, record in zip(rows, records, strict=True)}
        return StepResult(token_of, record_of, not_finite)

    def _sample(self, logits: torch.Tensor, segments: list[Segment]) -> tuple[dict[int, int], list[int]]:
        """A token for each row that is finite, and the other rows. Only where there are such are the rest sampled
        again; a row's token depends on that row alone."""
        try:
            return dict(enumerate(self._kernels.sample(logits, build_sampling(segments)).tolist())), []
        except NonFiniteLogitsError as error:
            refused = error.rows
            logger.error("%d of %d requests are given up: %s", len(refused), len(segments), error)
        rows = [row for row in range(len(segments)) if row not in refused]
        if not rows:
            return {}, refused
        tokens = self._kernels.sample(_rows(logits, rows), build_sampling([segments[row] for row in rows])).tolist()
        return dict(zip(rows, tokens, strict=True)), refused

    def _wait_for_device(self) -> None:
        """Where no token is read, so that what a result tells of is there, and its seconds are those that it took."""
        if self._kernels.device.type == "cuda":
            torch.cuda.current_stream(self._kernels.device).synchronize()

    def _hold_drills(self) -> None:
        if Fault.SLOW_STEP in self._faults:
            time.sleep(SLOW_STEP_SECONDS)
        if Fault.STEP_FAIL in self._faults:
            raise FireDrillError(Fault.STEP_FAIL)


def _rows(tensor: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """Those rows, in rising order; the tensor itself where that is all of them."""
    if len(rows) == len(tensor):
        return tensor
    return tensor[upload(torch.tensor(rows), tensor.device)]


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
