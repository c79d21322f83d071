"""Which class multiplies by which layer: chosen by device and format, proved on its first layer, and told at start."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from engine.errors import InsufficientMemoryError
from engine.kernels import KernelChoice
from engine.kernels.device import DeviceTraits
from engine.kernels.flashinfer.library import Library
from engine.kernels.linear.dense import Dense
from engine.kernels.linear.fp8 import Fp8
from engine.kernels.linear.nvfp4_flashinfer import Nvfp4W4A4, Nvfp4W4A16
from engine.kernels.linear.nvfp4_triton import Nvfp4Triton
from engine.kernels.linear.product import LinearClass, Product, Stack, format_name
from engine.kernels.linear.trial import find_fault
from engine.options import Activations
from engine.weights.formats import LinearWeight

logger = logging.getLogger("dalsegno.kernels")


@dataclass(slots=True)
class CensusLine:
    """Layers that differ only in their number, and what serves them. Grows while a model is loaded."""

    layers: str
    """`model.layers.*.mlp.gate_proj+up_proj`"""
    format: str
    kind: str
    reason: str
    """Why no class before it serves them; empty where it is the first for their format."""
    count: int = 0
    nbytes: int = 0

    def __str__(self) -> str:
        why = f" ({self.reason})" if self.reason else ""
        return f"{self.layers}: {self.kind} x {self.count}, {self.nbytes / 2**20:,.0f} MiB{why}"


@dataclass(frozen=True, slots=True)
class _Choice:
    linear_class: LinearClass
    reason: str


class LinearRoom:
    """Prepares linear layers, and keeps the census of them. Owned by the thread that loads the model."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        traits: DeviceTraits,
        activations: Activations,
        library: Library,
    ) -> None:
        self._device = device
        self._dtype = dtype
        self._traits = traits
        self._activations: Activations = activations
        self._dense = Dense(device, dtype)
        self._classes: tuple[LinearClass, ...] = (
            Nvfp4W4A4(device, dtype, traits, library),
            Nvfp4W4A16(device, dtype, traits, library),
            Nvfp4Triton(device, dtype, traits),
            Fp8(device, dtype, library),
            self._dense,
        )
        self._struck: dict[LinearClass, str] = {}
        """Classes that failed their trial, and how."""
        self._proved: set[LinearClass] = {self._dense}
        self._census: dict[tuple[str, str], CensusLine] = {}
        self._told: set[tuple[str, str]] = set()

    @property
    def classes(self) -> tuple[LinearClass, ...]:
        """In the order in which they are asked."""
        return self._classes

    @property
    def nbytes(self) -> int:
        """Of all layers prepared here."""
        return sum(line.nbytes for line in self._census.values())

    def prepare(self, shards: Sequence[LinearWeight]) -> Stack:
        """Stack the weights of layers that share an input, by rows. Formats and scales may differ: every shard keeps
        its own, and shards that cannot share a product get one each."""
        widths = {shard.in_features for shard in shards}
        if len(widths) != 1:
            raise ValueError(f"layers that are stacked must share their input; in-features are {sorted(widths)}")
        return Stack(tuple(self._products(shards)))

    def census(self) -> tuple[CensusLine, ...]:
        """Which class serves which layers, in the order in which they were loaded."""
        return tuple(self._census.values())

    def choices(self) -> tuple[KernelChoice, ...]:
        """One for each format and class, as the daemon shows them to operators."""
        seen = {(line.format, line.kind): line.reason for line in self._census.values()}
        return tuple(KernelChoice(f"linear ({form})", kind, reason) for (form, kind), reason in seen.items())

    def would_serve(self, shard: LinearWeight) -> KernelChoice:
        """The class that a layer like this one would get, as far as that can be told without its trial."""
        choice = self._choose(shard)
        return KernelChoice(f"linear ({format_name(shard)})", choice.linear_class.kind_of(shard), choice.reason)

    def _products(self, shards: Sequence[LinearWeight]) -> Iterator[Product]:
        chosen = [(self._choose(shard), shard) for shard in shards]
        for (choice, _), run in groupby(chosen, lambda pair: (pair[0], pair[0].linear_class.key(pair[1]))):
            group = [shard for _, shard in run]
            product = self._prepare_proved(choice, group)
            if product is None:
                yield from self._products(group)
            else:
                self._enter(choice, group, product)
                yield product

    def _choose(self, shard: LinearWeight) -> _Choice:
        reasons: list[str] = []
        for linear_class in self._classes:
            reason = self._struck.get(linear_class) or linear_class.supports(self._traits, shard, self._activations)
            if not reason:
                return _Choice(linear_class, "; ".join(reasons))
            if format_name(shard) in linear_class.formats:
                reasons.append(reason)
        raise AssertionError("the dense class serves everything")

    def _prepare_proved(self, choice: _Choice, shards: Sequence[LinearWeight]) -> Product | None:
        """None where the class failed its trial on these shards, and is struck off."""
        linear_class = choice.linear_class
        if isinstance(linear_class, Dense):
            self._make_sure_it_fits(choice, shards)
        if linear_class in self._proved:
            return linear_class.prepare(shards)
        product, fault = find_fault(linear_class, shards, self._device, self._dtype)
        if not fault:
            self._proved.add(linear_class)
            return product
        logger.warning("linear layers: %s is not used: %s", type(linear_class).__name__, fault)
        self._struck[linear_class] = fault
        return None

    def _make_sure_it_fits(self, choice: _Choice, shards: Sequence[LinearWeight]) -> None:
        needed = self._dense.bytes_of(shards)
        available = self._traits.total_bytes - self.nbytes
        if self._traits.total_bytes and needed > available:
            why = f", dequantised ({choice.reason})" if choice.reason else ""
            raise InsufficientMemoryError("the model's size", needed, max(available, 0), f"{_fold(shards)}{why}")

    def _enter(self, choice: _Choice, shards: Sequence[LinearWeight], product: Product) -> None:
        layers = _fold(shards)
        line = self._census.setdefault(
            (layers, product.kind), CensusLine(layers, format_name(shards[0]), product.kind, choice.reason)
        )
        line.count += 1
        line.nbytes += product.nbytes
        if choice.reason and (line.format, product.kind) not in self._told:
            self._told.add((line.format, product.kind))
            level = logging.WARNING if isinstance(choice.linear_class, Dense) else logging.INFO
            logger.log(level, "linear layers in %s: %s, because %s", line.format, product.kind, choice.reason)


def _fold(shards: Sequence[LinearWeight]) -> str:
    """The names of a stack's layers as one, without their number: `model.layers.*.mlp.gate_proj+up_proj`."""
    names = [re.sub(r"\.\d+(?=\.|$)", ".*", shard.name) or "?" for shard in shards]
    stem = names[0].rpartition(".")[0]
    if len(names) == 1 or any(name.rpartition(".")[0] != stem for name in names):
        return "+".join(names)
    prefix = f"{stem}." if stem else ""
    return prefix + "+".join(name.rpartition(".")[2] for name in names)
