"""One trial: the same work on two backends, from the same numbers, and how far apart they end."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch

from bench.gpu.budget import Budget
from bench.gpu.report import Comparison, Report, Verdict
from engine.kernels import Kernels

Values: TypeAlias = Mapping[str, torch.Tensor]
"""What a trial leaves behind, by name, on any device."""

POISON = 3.0e4
"""Written where nothing may be read from: large, but a product with 0 is still 0."""


@dataclass(frozen=True, slots=True)
class Trial:
    """`run` makes its own copies of its inputs, which are exact in bfloat16."""

    what: str
    """The method of `Kernels`, and what else of it is tried."""
    case: str
    run: Callable[[Kernels], Values]
    tolerance: float = 2e-2
    exact: frozenset[str] = frozenset()
    """Names of values that must be equal to the bit: what must not have been touched, or is only copied."""


class DeviceLostError(Exception):
    """A kernel has broken the device's context: nothing more can be run in this process."""


def generator_for(seed: int, *names: str) -> torch.Generator:
    """Numbers for one trial, whatever else is tried."""
    return torch.Generator().manual_seed((seed * 1_000_003 + zlib.crc32("/".join(names).encode())) % 2**63)


def randn(*shape: int, generator: torch.Generator, scale: float = 1.0) -> torch.Tensor:
    """Normal numbers that bfloat16 holds exactly, in float32 on the host."""
    return (torch.randn(*shape, generator=generator) * scale).bfloat16().float()


def on(kernels: Kernels, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A copy on the backend's device, in its dtype or `dtype`: never the caller's own tensor."""
    return tensor.to(device=kernels.device, dtype=dtype or kernels.dtype, copy=True)


def run_trials(
    section: str,
    trials: Iterable[Trial],
    reference: Kernels,
    candidate: Kernels,
    report: Report,
    budget: Budget,
) -> None:
    """Run them all; what raises is wrong. Raises DeviceLostError when the device is gone."""
    for trial in trials:
        if budget.is_used:
            report.skipped(section, f"{trial.what}, {trial.case} and what follows", budget.why)
            return
        report.compared(compare(section, trial, reference, candidate))


@torch.inference_mode()
def compare(section: str, trial: Trial, reference: Kernels, candidate: Kernels) -> Comparison:
    """Run one trial on both."""
    expected = _on_host(trial.run(reference))
    poison_free_memory(candidate.device)
    try:
        found = _on_host(trial.run(candidate))
    except Exception as error:  # noqa: BLE001 - whatever a kernel raises, it is wrong and the next one is tried
        check_device(candidate.device)
        detail = f"{type(error).__name__}: {str(error)[:500]}"
        return Comparison(section, trial.what, trial.case, None, trial.tolerance, Verdict.WRONG, detail)
    return judge(section, trial, expected, found)


def judge(section: str, trial: Trial, expected: Values, found: Values) -> Comparison:
    """The worst of all values, by relative error; one that must be exact and is not has an infinite one."""
    worst, where = 0.0, ""
    for name, value in expected.items():
        error = _error(value, found.get(name), is_exact=name in trial.exact)
        if not error <= worst:
            worst, where = error, name
    verdict = Verdict.RIGHT if worst <= trial.tolerance else Verdict.WRONG
    detail = "" if verdict is Verdict.RIGHT else f"{where}: error {worst:.2e}, allowed {trial.tolerance:.0e}"
    return Comparison(section, trial.what, trial.case, worst, trial.tolerance, verdict, detail)


def _error(expected: torch.Tensor, found: torch.Tensor | None, *, is_exact: bool) -> float:
    if found is None or found.shape != expected.shape:
        return float("inf")
    if is_exact:
        is_equal = torch.allclose(expected.double(), found.double(), rtol=0.0, atol=0.0, equal_nan=True)
        return 0.0 if is_equal else float("inf")
    return relative_error(expected, found)


def relative_error(expected: torch.Tensor, found: torch.Tensor) -> float:
    """The worst row (last dim) by |found - expected| / |expected|, in Euclidean norms; a row that is smaller than
    half the mean is measured against that. Anything not finite is infinitely wrong."""
    expected, found = expected.double(), found.double()
    if not expected.numel():
        return 0.0
    if not bool(found.isfinite().all()):
        return float("inf")
    rows = expected.reshape(-1, expected.shape[-1])
    norms = torch.linalg.vector_norm(rows, dim=-1)
    floor = 0.5 * float(norms.mean()) or 1e-30
    distances = torch.linalg.vector_norm(found.reshape(rows.shape) - rows, dim=-1)
    return float((distances / norms.clamp_min(floor)).max())


def _on_host(values: Values) -> Values:
    return {name: _widened(value) for name, value in values.items()}


def _widened(value: torch.Tensor) -> torch.Tensor:
    value = value.detach()
    return (value.float() if value.is_floating_point() else value).cpu()


def poison_free_memory(device: torch.device, large_bytes: int = 2**28) -> None:
    """Leave NaN in the memory that torch will hand out next, so that an output that is not written shows."""
    if device.type != "cuda":
        return
    sizes = (*[2**10] * 64, *[2**16] * 32, *[2**20] * 8, large_bytes)
    held = [torch.full((size // 4,), float("nan"), device=device) for size in sizes]
    del held


def check_device(device: torch.device) -> None:
    """Raises DeviceLostError when the device answers no more."""
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
        torch.zeros(1, device=device).item()
    except Exception as error:
        raise DeviceLostError(f"{type(error).__name__}: {str(error).splitlines()[0]}") from error
