"""flashinfer's references for the linear layers, for any architecture."""

from __future__ import annotations

from typing import Any

import torch
from flashinfer.gemm.gemm_bf16_fp4_cute_dsl import _prepare_cute_dsl_sm100

from tests.engine.kernels.flashinfer.reference_library import ReferenceLibrary


class LinearLibrary(ReferenceLibrary):
    """flashinfer's references; the layout that only a GPU lets it choose is prepared here by its own code."""

    def prepare_bf16_fp4_weights(self, *, b: torch.Tensor, b_descale: torch.Tensor, alpha: Any, backend: str) -> Any:
        assert backend == "cute-dsl", backend
        return _prepare_cute_dsl_sm100(b, b_descale, alpha, 16)

    def __init__(self) -> None:
        super().__init__()
        # The parent sets an attribute for each name, which would hide the method.
        del self.__dict__["prepare_bf16_fp4_weights"]
