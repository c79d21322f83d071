"""The trial of a linear layer's shape on this machine: oneDNN's packed product against torch's own, which is MKL's.

Which of them is faster depends on the processor's maker, its vector units and the shape. Torch's own is what everybody
else computes with. A layer is held in one layout, which decodes and prefills share, so the packed product is taken
where it gains at least as much for one of one row and many as it loses for the other. A product in bfloat16 is no
candidate: it rounds activations to 2**-9, and the logits of a hit are promised to agree with those of a cold run to
1e-4.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.kernels import KernelChoice

MANY_ROWS = 32
_FEWEST_WEIGHTS = 2**14
"""A smaller matrix takes no time worth a trial: it is packed."""
_ROUNDS, _MOST_ROUNDS, _ROUNDS_SECONDS = 3, 7, 0.03
_CACHE_BYTES = 2**24
"""Read before each product: in a step a layer's weights come from memory, for all the other layers' came in between."""
_TIE = 1.03

Product = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Trial:
    """Seconds of either product, for one row and for MANY_ROWS."""

    packed: tuple[float, float]
    plain: tuple[float, float]

    @property
    def prefers_packed(self) -> bool:
        one, many = self._shares
        return one * many <= _TIE

    @property
    def _shares(self) -> tuple[float, float]:
        """What packed takes of the time of plain, for one row and for many."""
        return self.packed[0] / self.plain[0], self.packed[1] / self.plain[1]

    def __str__(self) -> str:
        name = "oneDNN packed" if self.prefers_packed else "torch's own"
        one, many = self._shares
        return f"{name}; packed takes {one:.2f} of the time of torch's own for 1 row, {many:.2f} for {MANY_ROWS}"


class Trials:
    """The trials of one process: a shape is tried once, so that all its layers, and a model that is loaded again, get
    the same product and give the same bits. Mutable; belongs to the thread that loads."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._found: dict[tuple[int, int, torch.dtype, int], Trial] = {}

    def prefers_packed(self, packed: torch.Tensor, plain: torch.Tensor) -> bool:
        """plain [out, in], and the same in oneDNN's layout."""
        if plain.numel() < _FEWEST_WEIGHTS:
            return True
        key = (*plain.shape, plain.dtype, torch.get_num_threads())
        if key not in self._found:
            self._found[key] = self._try(packed, plain)
        return self._found[key].prefers_packed

    def choices(self, dtype: torch.dtype) -> Iterator[KernelChoice]:
        """What was found for weights of that dtype, shape by shape: a process may have held models of others."""
        for (out_features, in_features, found, _), trial in self._found.items():
            if found is not dtype:
                continue
            shape = f"{out_features} x {in_features} in {str(dtype).removeprefix('torch.')}"
            yield KernelChoice(f"linear ({shape})", str(trial))

    def _try(self, packed: torch.Tensor, plain: torch.Tensor) -> Trial:
        with torch.inference_mode():
            of_one, of_many = (self._race(packed, plain, rows) for rows in (1, MANY_ROWS))
        return Trial((of_one[0], of_many[0]), (of_one[1], of_many[1]))

    def _race(self, packed: torch.Tensor, plain: torch.Tensor, rows: int) -> tuple[float, float]:
        """The least seconds of each in some rounds, in turns: what another process takes away, it takes from both."""
        x = torch.zeros(rows, plain.shape[1], dtype=plain.dtype)
        products: tuple[Product, Product] = (lambda x: multiply_packed(x, packed, None), lambda x: F.linear(x, plain))
        for product in products:
            product(x)
        least = [float("inf")] * 2
        others = torch.zeros(_CACHE_BYTES // 4)
        ends_at = self._clock() + _ROUNDS_SECONDS
        for done in range(_MOST_ROUNDS):
            if done >= _ROUNDS and self._clock() >= ends_at:
                break
            for i, product in enumerate(products):
                others.sum()
                began = self._clock()
                product(x)
                least[i] = min(least[i], self._clock() - began)
        return least[0], least[1]


def multiply_packed(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [n, in] -> [n, out]."""
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return result


TRIALS = Trials()
"""Those of this process."""
