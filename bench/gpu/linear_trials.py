"""Trials of linear layers: every class that this device supports, and the backend's own choice, against float64."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from bench.gpu.budget import Budget
from bench.gpu.report import Comparison, Report, Verdict
from bench.gpu.trials import check_device, generator_for, on, poison_free_memory, randn, relative_error
from engine.kernels import Kernels
from engine.kernels.device import DeviceTraits
from engine.kernels.linear.product import row_steps
from engine.kernels.torch.linear import dense_weight
from engine.models.config import ModelConfig
from engine.options import Activations
from engine.weights.formats import DenseWeight, Fp8Weight, LinearWeight, Nvfp4Weight
from engine.weights.nvfp4 import E2M1_MAX, E4M3_MAX, dequantize_nvfp4, quantize_nvfp4

FORMATS = ("dense", "fp8", "fp8 by channel", "nvfp4")
_BATCHES = (1, 5, 130)
_TOLERANCE = 2e-2
_ROUNDED_TOLERANCE = 8e-2
"""Against activations that were rounded here: a last bit of bfloat16 can send one to the neighbouring e2m1 value."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Rows of each shard of a stack, and what they share."""

    rows: tuple[int, ...]
    in_features: int

    def __str__(self) -> str:
        return f"{'+'.join(map(str, self.rows))} x {self.in_features}"


def shapes_of(config: ModelConfig) -> list[Shape]:
    """Every width that a layer of `config` has; the number of rows is cut, but for the narrow ones of b and a."""
    gdn = config.gated_delta_net
    found = [Shape((1024, 512), config.hidden_size), Shape((config.hidden_size,), config.intermediate_size)]
    if gdn is not None:
        found.append(Shape((gdn.num_v_heads, gdn.num_v_heads), config.hidden_size))
        found.append(Shape((640,), gdn.value_dim))
    return found


def random_weight(
    format_name: str,
    rows: int,
    columns: int,
    generator: torch.Generator,
    *,
    name: str = "",
    has_input_scale: bool = True,
) -> LinearWeight:
    """A weight as a checkpoint would hold it, of about the size that keeps activations as they are; each has scales of
    its own. `input_scale` suits activations of standard deviation 1."""
    weight = torch.randn(rows, columns, generator=generator) * columns**-0.5
    weight *= float(torch.empty(1).uniform_(0.3, 3.0, generator=generator))
    if format_name == "dense":
        return DenseWeight(weight.bfloat16(), name=name)
    if format_name == "nvfp4":
        scale = torch.tensor(5.0 / (E2M1_MAX * E4M3_MAX)) if has_input_scale else None
        return replace(quantize_nvfp4(weight), input_scale=scale, name=name)
    amax = weight.abs().amax(dim=1) if format_name == "fp8 by channel" else weight.abs().max()
    scale = (amax / E4M3_MAX).float()
    stored = (weight / (scale if scale.dim() == 0 else scale.unsqueeze(1))).to(torch.float8_e4m3fn)
    is_static = format_name == "fp8" and has_input_scale
    return Fp8Weight(stored, scale, torch.tensor(5.0 / E4M3_MAX) if is_static else None, name=name)


def run_backend_linears(
    section: str, config: ModelConfig, seed: int, candidate: Kernels, report: Report, budget: Budget
) -> None:
    """Each format through `prepare_linear` and `linear`, shards stacked, one of them with a bias."""
    for format_name in (*FORMATS, "mixed"):
        for shape in shapes_of(config):
            case = f"{format_name}, {shape}"
            if budget.is_used:
                report.skipped(section, f"linear, {case} and what follows", budget.why)
                return
            report.compared(_backend_linear(section, format_name, shape, seed, candidate))


def _backend_linear(section: str, format_name: str, shape: Shape, seed: int, candidate: Kernels) -> Comparison:
    case = f"{format_name}, {shape}"
    generator = generator_for(seed, "linear", case)
    names = FORMATS if format_name == "mixed" else (format_name,)
    shards = [
        random_weight(names[i % len(names)], rows, shape.in_features, generator, name=f"check.shard{i}")
        for i, rows in enumerate(shape.rows)
    ]
    shards[0] = replace(shards[0], bias=randn(shape.rows[0], generator=generator))
    try:
        with torch.inference_mode():
            layer = candidate.prepare_linear(shards)
            errors = [
                _error(layer.kind, shards, randn(batch, shape.in_features, generator=generator), candidate, layer)
                for batch in _BATCHES
            ]
    except Exception as error:  # noqa: BLE001 - whatever it raises is wrong, and the next one is tried
        check_device(candidate.device)
        return _raised(section, case, error)
    worst, tolerance = max(errors)
    return _judged(section, f"linear: {layer.kind}", case, worst, tolerance)


def _error(
    kind: str, shards: Sequence[LinearWeight], x: torch.Tensor, candidate: Kernels, layer: Any
) -> tuple[float, float]:
    """The relative error and what is allowed: where activations are rounded, what rounding them costs by itself."""
    poison_free_memory(candidate.device)
    found = candidate.linear(on(candidate, x), layer).float().cpu()
    expected = torch.cat([_product(x, shard) for shard in shards], dim=1)
    rounding = max((_activation_noise(x, shard, kind) for shard in shards), default=0.0)
    return relative_error(expected, found), max(_TOLERANCE, 2.0 * rounding)


def _activation_noise(x: torch.Tensor, shard: LinearWeight, kind: str) -> float:
    """What rounding x to the shard's format does to the product; 0 where `kind` says that activations stay."""
    is_rounded = ("w4a4" in kind and isinstance(shard, Nvfp4Weight)) or (
        "w8a8" in kind and isinstance(shard, Fp8Weight)
    )
    if not is_rounded:
        return 0.0
    return relative_error(_product(x, shard), _product(rounded_activations(x, shard), shard))


def run_class_linears(
    section: str,
    classes: Sequence[Any],
    config: ModelConfig,
    seed: int,
    kernels: Kernels,
    traits: DeviceTraits,
    report: Report,
    budget: Budget,
) -> None:
    """Each of `classes` (`engine.kernels.linear`) by itself, also where another is preferred to it."""
    asked: Activations = "fp4"
    told: set[tuple[str, str, str]] = set()
    for linear_class in classes:
        name = type(linear_class).__name__
        for format_name in FORMATS:
            if format_name.split(" ")[0] not in linear_class.formats:
                continue
            for shape in shapes_of(config):
                case = f"{format_name}, {shape}"
                generator = generator_for(seed, name, case)
                shards = [
                    random_weight(format_name, rows, shape.in_features, generator, name="check")
                    for rows in shape.rows[:1]
                ]
                if reason := _why_not(linear_class, traits, shards[0], asked):
                    if (name, format_name, reason) not in told:
                        told.add((name, format_name, reason))
                        report.skipped(section, f"{name}, {format_name}", reason)
                elif budget.is_used:
                    report.skipped(section, f"{name}, {case} and what follows", budget.why)
                    return
                else:
                    report.compared(_class_linear(section, linear_class, shards, case, generator, kernels))


def _why_not(linear_class: Any, traits: DeviceTraits, shard: LinearWeight, asked: Activations) -> str:
    try:
        return str(linear_class.supports(traits, shard, asked))
    except AttributeError as error:
        return f"flashinfer is not here ({error})"


def _class_linear(
    section: str,
    linear_class: Any,
    shards: Sequence[LinearWeight],
    case: str,
    generator: torch.Generator,
    kernels: Kernels,
) -> Comparison:
    what = f"linear: {type(linear_class).__name__}"
    try:
        with torch.inference_mode():
            product = linear_class.prepare(shards)
            worst = 0.0
            for batch in _BATCHES:
                x = randn(batch, shards[0].in_features, generator=generator)
                poison_free_memory(kernels.device)
                found = product.apply(on(kernels, x)).float().cpu()
                is_rounded = linear_class.activation_range is not None
                seen = rounded_activations(x, shards[0]) if is_rounded else x
                worst = max(worst, relative_error(_product(seen, shards[0]), found))
    except Exception as error:  # noqa: BLE001 - whatever it raises is wrong, and the next one is tried
        check_device(kernels.device)
        return _raised(section, case, error, what)
    return _judged(section, what, case, worst, _ROUNDED_TOLERANCE if is_rounded else _TOLERANCE)


def rounded_activations(x: torch.Tensor, shard: LinearWeight) -> torch.Tensor:
    """x [n, in] as a kernel sees it that rounds activations to the shard's format: by its `input_scale`, or by a power
    of two for each row."""
    assert isinstance(shard, Fp8Weight | Nvfp4Weight), "plain layers round no activations"
    limit = E4M3_MAX * (E2M1_MAX if isinstance(shard, Nvfp4Weight) else 1.0)
    steps = row_steps(x, limit) if shard.input_scale is None else shard.input_scale.float().expand(len(x), 1)
    scaled = x / steps
    if isinstance(shard, Fp8Weight):
        rounded = scaled.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float()
    else:
        rounded = dequantize_nvfp4(quantize_nvfp4(scaled, amax=torch.tensor(limit)))
    return rounded * steps


def _product(x: torch.Tensor, shard: LinearWeight) -> torch.Tensor:
    out = x.double() @ dense_weight(shard).double().t()
    return out if shard.bias is None else out + shard.bias.double()


def _judged(section: str, what: str, case: str, worst: float, tolerance: float) -> Comparison:
    verdict = Verdict.RIGHT if worst <= tolerance else Verdict.WRONG
    return Comparison(section, what, case, worst, tolerance, verdict)


def _raised(section: str, case: str, error: Exception, what: str = "linear") -> Comparison:
    return Comparison(section, what, case, None, None, Verdict.WRONG, f"{type(error).__name__}: {str(error)[:500]}")


def room_classes(kernels: Kernels, traits: DeviceTraits, library: Any) -> Iterator[Any]:
    """The classes that a room on this device has, in their order."""
    from engine.kernels.linear import LinearRoom

    room = LinearRoom(kernels.device, kernels.dtype, traits, "fp4", library)
    yield from room.classes
