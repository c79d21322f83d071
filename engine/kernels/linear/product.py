"""What every way to multiply by weights looks like, and what the ways share."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.errors import WeightsError
from engine.kernels.device import DeviceTraits
from engine.options import Activations
from engine.weights.formats import DenseWeight, Fp8Weight, LinearWeight, Nvfp4Weight


class Product(Protocol):
    """The rows of one or more shards, ready to be multiplied by."""

    @property
    def kind(self) -> str: ...

    @property
    def out_features(self) -> int: ...

    @property
    def in_features(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """x [n, in] -> a new tensor [n, out]: x @ weight.T + bias."""
        ...


class LinearClass(Protocol):
    """One way to multiply. It knows its device, dtype and library; the room asks the classes in order."""

    formats: tuple[str, ...]
    """What it is made for, by `format_name`."""
    activation_range: float | None
    """The greatest value that a quantised activation stands for, in units of its scale; None where activations stay in
    bfloat16."""
    noise: float
    """The relative error beyond which a product is wrong rather than rounded."""

    def supports(self, traits: DeviceTraits, shard: LinearWeight, activations: Activations) -> str:
        """Empty where it can serve the shard, otherwise why it cannot."""
        ...

    def kind_of(self, shard: LinearWeight) -> str:
        """What the product of such a shard is called."""
        ...

    def key(self, shard: LinearWeight) -> Hashable:
        """Neighbouring shards of one key are multiplied together: whatever the kernel has one of, they share."""
        ...

    def prepare(self, shards: Sequence[LinearWeight]) -> Product:
        """Stack shards of one key by rows, on the device."""
        ...


@dataclass(frozen=True, slots=True)
class Stack:
    """Products of one input; their outputs side by side, in the order of the rows."""

    products: tuple[Product, ...]

    @property
    def kind(self) -> str:
        return " + ".join(dict.fromkeys(product.kind for product in self.products))

    @property
    def out_features(self) -> int:
        return sum(product.out_features for product in self.products)

    @property
    def in_features(self) -> int:
        return self.products[0].in_features

    @property
    def nbytes(self) -> int:
        return sum(product.nbytes for product in self.products)

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """x [n, in] -> [n, out]."""
        return beside([product.apply(x) for product in self.products])


def format_name(shard: LinearWeight) -> str:
    if isinstance(shard, DenseWeight):
        return "dense"
    return "fp8" if isinstance(shard, Fp8Weight) else "nvfp4"


def dtype_name(dtype: torch.dtype) -> str:
    return "bf16" if dtype == torch.bfloat16 else str(dtype).removeprefix("torch.")


def nvfp4_shards(shards: Sequence[LinearWeight]) -> list[Nvfp4Weight]:
    weights = [shard for shard in shards if isinstance(shard, Nvfp4Weight)]
    assert len(weights) == len(shards), "the class was asked to prepare what it does not support"
    return weights


def beside(outputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """[n, ...] each -> all columns, in their order; a single one is not copied."""
    return outputs[0] if len(outputs) == 1 else torch.cat(list(outputs), dim=1)


def add_bias(out: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """In place."""
    return out if bias is None else out.add_(bias)


def stack_biases(shards: Sequence[LinearWeight], dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
    """[out], or None where no shard has one; 0 for the rows of shards without."""
    if all(shard.bias is None for shard in shards):
        return None
    parts = [torch.zeros(shard.out_features) if shard.bias is None else shard.bias for shard in shards]
    return torch.cat([part.to(device=device, dtype=dtype) for part in parts])


def stack_rows(parts: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The parts on the device, one below the other; a single part is not copied twice."""
    moved = [part.to(device) for part in parts]
    return moved[0].contiguous() if len(moved) == 1 else torch.cat(moved)


def positive_scale(scale: torch.Tensor, shard: LinearWeight, what: str) -> float:
    """A scale of the checkpoint as a number. Raises WeightsError where it cannot be divided by."""
    value = float(scale)
    if not 0.0 < value < float("inf"):
        raise WeightsError(f"{shard.name or 'a linear layer'}: {what} is {value}; expected a positive, finite number")
    return value


def scalar(value: float, device: torch.device) -> torch.Tensor:
    """[1] float32 on the device: flashinfer reads its scales from there."""
    return torch.tensor([value], dtype=torch.float32, device=device)


def total_bytes(*tensors: torch.Tensor | None) -> int:
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def row_steps(x: torch.Tensor, limit: float) -> torch.Tensor:
    """[n, 1] float32: for each row the power of two that brings it within +-limit when divided by it.

    A row's step depends on that row alone, so a token's result does not depend on its batch; and dividing and
    multiplying by a power of two rounds nothing. A row of zeros has step 1; one that is not finite has NaN, so that it
    stays seen through formats that have no infinity.
    """
    amax = x.abs().amax(dim=1, keepdim=True).float()
    exponent = torch.frexp(amax / limit).exponent.clamp_(-126, 127)
    # By its bits, where a power function may be off by one.
    steps = ((exponent + 127) << 23).view(torch.float32)
    return steps + (amax - amax)


def denied(function: object, traits: DeviceTraits, backend: str) -> bool:
    """Whether the installed flashinfer says itself that it has no such kernel for this architecture.

    It says so for functions with a choice of backends; a reference in plain torch, which stands for them in tests, says
    nothing.
    """
    if traits.capability is None:
        return True
    number = traits.capability[0] * 10 + traits.capability[1]
    name = "is_compute_capability_supported" if backend == "auto" else "is_backend_supported"
    ask = getattr(function, name, None)
    if ask is None:
        return False
    return not (ask(number) if backend == "auto" else ask(backend, number))
