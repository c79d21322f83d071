"""CUDA graphs of decode steps: the work of a step of so many decodes, captured once and replayed for each."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Protocol, TypeGuard, runtime_checkable

import torch

from engine.kernels import BatchLayout, KernelChoice, Kernels
from engine.models.registry import Model
from engine.progress import track
from engine.storage import ModelState
from engine.uploads import upload_into

MOST_ROWS = 32
"""Decodes in the largest step that is captured: beyond it, a step takes so long that launching its kernels hides behind
them."""
_WARM_UP_RUNS = 2
"""Before a capture: the first run compiles kernels and allocates their workspaces, which a capture must not."""
_DUMMY_PAGES = 2
"""For each sequence of the steps that are captured and tried."""
_TOLERANCE = 0.02
"""Of the largest logit: between a replayed step and the same one run eagerly."""
_KERNEL = "decode step"

logger = logging.getLogger("dalsegno.kernels")

Work = Callable[[], None]


@runtime_checkable
class CapturableKernels(Protocol):
    """What `Kernels` offer besides where a step of decodes can be captured."""

    @property
    def can_capture(self) -> bool:
        """Whether a step of decodes, once planned, touches neither the host nor memory that is not torch's."""
        ...

    def prepare_decodes(self, max_batch: int, max_pages: int) -> None:
        """From now on `plan` writes a step of 1..`max_batch` decodes, with at most `max_pages` page indices in all, to
        the same device memory each time."""
        ...


class Recorder(Protocol):
    """Captures work on a device."""

    def warm_up(self, work: Work) -> None:
        """Run it as it will be captured, but for real."""
        ...

    def record(self, work: Work) -> Work:
        """Capture it, without running it; what is returned replays it, on the current stream."""
        ...

    def free_bytes(self) -> int:
        """The device's memory that nobody has, with what is only cached given back."""
        ...


class DecodeGraphs:
    """One graph for each number of decodes, as there is no padding: a step of three costs what three cost. Mutable: it
    belongs to the engine thread, but for `capture`, which comes before that.

    They share one pool of memory, which is sound because no two of them run at a time and nothing that lies in it is
    read after a replay: tokens go in and logits come out through tensors of their own. Sampling stays outside.
    """

    def __init__(
        self,
        model: Model,
        kernels: Kernels,
        state: ModelState,
        *,
        page_size: int,
        max_batch: int,
        max_pages: int,
        recorder: Recorder | None = None,
    ) -> None:
        """Captures nothing yet. `max_pages`: page indices of all sequences of a step together; `recorder` is CUDA's
        where the kernels are on a GPU."""
        self._model = model
        self._kernels = kernels
        self._state = state
        self._page_size = page_size
        pages = min([max_pages, *map(len, state.kv)])
        self._max_batch = min(max_batch, MOST_ROWS, pages // _DUMMY_PAGES)
        self._max_pages = max_pages
        self._recorder = recorder
        self._replays: dict[int, Work] = {}
        self._token_ids = torch.empty(0, dtype=torch.int64)
        self._logits = torch.empty(0)
        self.choice = KernelChoice(_KERNEL, "eager", _why_not(kernels, self._max_batch))
        """How decode steps run, and why not as graphs; nothing was to be captured on a CPU."""
        self.taken_bytes = 0
        """Of the device, by graphs and what they share."""

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture every size, the largest first, whose memory the smaller ones then use again; and try each, for what a
        graph froze that it should read anew gives wrong tokens, not errors.

        To be called while no sequence holds a page or a slot: the captured step is one of sequences that do not exist,
        in the first pages and slots, which are zero again afterwards. When a size cannot be captured, none is kept and
        all steps run eagerly; the log and `choice` say why.
        """
        kernels = self._kernels
        if not _can_capture(kernels) or not self._max_batch:
            if self.choice.reason:
                logger.warning("decode steps run eagerly, which is slower: %s", self.choice.reason)
            return
        recorder = self._recorder or CudaRecorder(self._kernels.device)
        free_bytes = recorder.free_bytes()
        try:
            kernels.prepare_decodes(self._max_batch, self._max_pages)
            with track("capturing decode steps", self._max_batch, unit="graphs") as advance:
                for rows in range(self._max_batch, 0, -1):
                    self._replays[rows] = self._record(rows, recorder)
                    self._try(rows)
                    advance(1)
        except Exception as error:
            # Whatever it is, eager steps do without it; and where they need it too, they fail and say so.
            self._replays.clear()
            self.choice = KernelChoice(_KERNEL, "eager", f"capture failed: {type(error).__name__}: {error}")
            logger.warning("decode steps run eagerly, which is slower: %s", self.choice.reason, exc_info=error)
            error.__traceback__ = None  # its frames hold the step's tensors
        else:
            sizes = f"1 to {self._max_batch}" if self._max_batch > 1 else "1"
            self.choice = KernelChoice(_KERNEL, f"CUDA graphs for {sizes} sequences")
        finally:
            self._forget_dummies()
        self.taken_bytes = max(0, free_bytes - recorder.free_bytes())
        logger.info("%s: %s, %.0f MiB", self.choice.kernel, self.choice.implementation, self.taken_bytes / 2**20)

    def run(self, layout: BatchLayout, token_ids: torch.Tensor) -> torch.Tensor | None:
        """token_ids [n] int64 on the host, of the layout that the kernels have planned -> float32 [n, vocab], which the
        caller may change and the next call overwrites; None for a step that was not captured."""
        replay = self._replays.get(layout.num_sequences)
        is_captured = layout.num_decodes == layout.num_sequences and not layout.captures
        if replay is None or not is_captured or len(layout.kv_indices) > self._max_pages:
            return None
        upload_into(self._token_ids[: len(token_ids)], token_ids)
        replay()
        return self._logits[: len(token_ids)]

    def _record(self, rows: int, recorder: Recorder) -> Work:
        self._kernels.plan(self._dummies(rows))
        if not len(self._token_ids):
            self._allocate()

        def step() -> None:
            hidden = self._model.forward(self._kernels, self._state, self._token_ids[:rows])
            self._logits[:rows].copy_(self._model.logits(self._kernels, hidden))

        for _ in range(_WARM_UP_RUNS):
            recorder.warm_up(step)
        return recorder.record(step)

    def _try(self, rows: int) -> None:
        """Raises ValueError when replayed steps give other logits than eager ones: two steps, the second with other
        tokens, longer contexts, and the slots and pages of the first in another order."""
        layouts = (self._dummies(rows), self._dummies(rows, is_second=True))
        for replayed, eager in zip(
            self._logits_of(layouts, self.run), self._logits_of(layouts, self._eagerly), strict=True
        ):
            assert replayed is not None
            assert eager is not None
            error, largest = float((replayed - eager).abs().max()), float(eager.abs().max())
            if not error <= _TOLERANCE * largest:
                raise ValueError(f"a graph of {rows} sequences gives other logits: {error:.3g} off, of {largest:.3g}")

    def _logits_of(
        self, layouts: Iterable[BatchLayout], run: Callable[[BatchLayout, torch.Tensor], torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        self._forget_dummies()
        found: list[torch.Tensor | None] = []
        for number, layout in enumerate(layouts):
            self._kernels.plan(layout)
            token_ids = torch.arange(layout.num_sequences) * 7 + number + 1
            logits = run(layout, token_ids % self._model.config.vocab_size)
            found.append(None if logits is None else logits.clone())
        return found

    def _eagerly(self, layout: BatchLayout, token_ids: torch.Tensor) -> torch.Tensor:
        hidden = self._model.forward(self._kernels, self._state, token_ids.to(self._kernels.device))
        return self._model.logits(self._kernels, hidden)

    def _allocate(self) -> None:
        device = self._kernels.device
        self._token_ids = torch.zeros(self._max_batch, dtype=torch.int64, device=device)
        self._logits = torch.zeros((self._max_batch, self._model.config.vocab_size), device=device)

    def _dummies(self, rows: int, *, is_second: bool = False) -> BatchLayout:
        """The first of two steps of as many sequences, of two tokens each; or the second, in which a sequence has more
        tokens and takes up the slot and the pages of another."""
        tokens = self._page_size + 1 if is_second else 2
        each = -(-tokens // self._page_size)
        order = torch.arange(rows, dtype=torch.int32)
        order = order.flip(0) if is_second else order
        pages = order[:, None] * _DUMMY_PAGES + torch.arange(each, dtype=torch.int32)
        indptr = torch.arange(rows + 1, dtype=torch.int32)
        return BatchLayout(
            num_decodes=rows,
            qo_indptr=indptr,
            kv_indptr=indptr * each,
            kv_indices=pages.flatten(),
            kv_last_page_len=torch.full((rows,), (tokens - 1) % self._page_size + 1, dtype=torch.int32),
            positions=torch.full((rows,), tokens - 1, dtype=torch.int32),
            state_slots=order,
            has_initial_state=torch.ones(rows, dtype=torch.bool),
            page_size=self._page_size,
        )

    def _forget_dummies(self) -> None:
        for tensor in self._state.kv:
            tensor[: self._max_batch * _DUMMY_PAGES].zero_()
        for tensor in (*self._state.conv, *self._state.recurrent):
            tensor[: self._max_batch].zero_()


def _can_capture(kernels: Kernels) -> TypeGuard[CapturableKernels]:
    return isinstance(kernels, CapturableKernels) and kernels.can_capture


def _why_not(kernels: Kernels, max_batch: int) -> str:
    if not max_batch:
        return f"a graph is tried on {_DUMMY_PAGES} KV pages, and there are not so many"
    if kernels.device.type == "cpu" or _can_capture(kernels):
        return ""
    others = ", ".join(choice.kernel for choice in kernels.choices if choice.reason)
    return f"a step of the {kernels.name} kernels cannot be captured with what serves {others or 'them'} here"


class CudaRecorder:
    """Captures by `torch.cuda.CUDAGraph`. Warm-up runs and captures are on a stream of their own, as torch's notes on
    graphs want it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def warm_up(self, work: Work) -> None:
        with self._on_its_stream():
            work()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def record(self, work: Work) -> Work:
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the GPU meanwhile: what they do does not concern this stream.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            work()
        return graph.replay

    def free_bytes(self) -> int:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        free, _total = torch.cuda.mem_get_info(self._device)
        return int(free)

    def _on_its_stream(self) -> AbstractContextManager[object]:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(self._stream)
