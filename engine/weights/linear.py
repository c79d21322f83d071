"""One linear layer out of a checkpoint: which format its tensors are in, and that all of them fit together."""

from __future__ import annotations

from typing import Protocol

import torch

from engine.errors import WeightsError
from engine.weights.formats import DenseWeight, Fp8Weight, LinearWeight, Nvfp4Weight
from engine.weights.nvfp4 import BLOCK_COLUMNS
from engine.weights.safetensors_files import TensorEntry

DENSE_DTYPES = ("F32", "BF16", "F16")

# The tensors that each format has beside its weight; every other suffix of _KNOWN_SUFFIXES on a layer is an error.
_FP8_SUFFIXES = frozenset({"weight", "weight_scale", "input_scale"})
_MODELOPT_SUFFIXES = frozenset({"weight", "weight_scale", "weight_scale_2", "input_scale"})
_COMPRESSED_SUFFIXES = frozenset({"weight_packed", "weight_scale", "weight_global_scale", "input_global_scale"})
_KNOWN_SUFFIXES = _MODELOPT_SUFFIXES | _COMPRESSED_SUFFIXES

# Tensors that give away a format that is not read here.
_UNSUPPORTED_SUFFIXES = {
    "weight_scale_inv": "block-wise fp8 (weight_scale_inv)",
    "qweight": "AWQ or GPTQ",
    "qzeros": "AWQ or GPTQ",
    "g_idx": "GPTQ",
    "weight_shape": "compressed-tensors pack-quantized (int4 or int8)",
    "weight_zero_point": "asymmetric compressed-tensors",
    "weight_g_idx": "compressed-tensors with activation order",
    "weight_blocks": "MXFP4",
    "pre_quant_scale": "ModelOpt AWQ (pre_quant_scale)",
    "weight.absmax": "bitsandbytes",
    "weight.quant_map": "bitsandbytes",
}
_SUPPORTED = "expected float32, bfloat16, float16, fp8 e4m3 per tensor or per channel, or NVFP4"


class TensorSource(Protocol):
    """Where tensors come from."""

    def entry(self, name: str) -> TensorEntry | None:
        """The tensor's header, or None. Does not count as a use."""
        ...

    def take(self, entry: TensorEntry) -> torch.Tensor:
        """The tensor; counts as a use."""
        ...


def read_linear(
    source: TensorSource, prefix: str, out_features: int, in_features: int, *, has_bias: bool = False
) -> LinearWeight:
    """The layer `prefix` in the format that its tensors are in. Raises WeightsError that names the tensor at fault."""
    layer = _Layer(source, prefix, out_features, in_features)
    bias = layer.floats("bias", (out_features,)) if has_bias else None
    if layer.entry("weight_packed") is not None:
        return layer.compressed_nvfp4(bias)
    weight = layer.require("weight")
    if weight.dtype in DENSE_DTYPES:
        return layer.dense(bias)
    if weight.dtype == "F8_E4M3":
        return layer.fp8(bias)
    if weight.dtype == "U8":
        return layer.modelopt_nvfp4(bias)
    raise WeightsError(f"{weight.file.name}: tensor {weight.name} is {weight.dtype}; {_SUPPORTED}")


class _Layer:
    """The tensors under one prefix."""

    def __init__(self, source: TensorSource, prefix: str, out_features: int, in_features: int) -> None:
        self.source = source
        self.prefix = prefix
        self.out_features = out_features
        self.in_features = in_features
        for suffix, what in _UNSUPPORTED_SUFFIXES.items():
            entry = self.entry(suffix)
            if entry is not None:
                raise WeightsError(f"{entry.file.name}: tensor {entry.name}: {what} is not supported; {_SUPPORTED}")

    def dense(self, bias: torch.Tensor | None) -> DenseWeight:
        self._refuse_other_suffixes(frozenset({"weight"}), "a weight that is not quantised")
        weight = self.floats("weight", (self.out_features, self.in_features))
        return DenseWeight(weight=weight, bias=bias, name=self.prefix)

    def fp8(self, bias: torch.Tensor | None) -> Fp8Weight:
        self._refuse_other_suffixes(_FP8_SUFFIXES, "an fp8 weight")
        scale = self.require("weight_scale", "an fp8 weight needs its scale")
        per_tensor, per_channel = ((), (1,), (1, 1)), ((self.out_features,), (self.out_features, 1))
        if scale.shape not in (*per_tensor, *per_channel):
            raise WeightsError(
                f"{scale.file.name}: tensor {scale.name} has shape {list(scale.shape)}; expected one value, or one for "
                f"each of {self.out_features} rows (block-wise fp8 is not supported)"
            )
        values = _take_positive(self.source, scale)
        return Fp8Weight(
            weight=self._exact("weight", "F8_E4M3", (self.out_features, self.in_features)),
            scale=values.view(()) if scale.shape in per_tensor else values.view(-1),
            input_scale=self._scalar("input_scale"),
            bias=bias,
            name=self.prefix,
        )

    def modelopt_nvfp4(self, bias: torch.Tensor | None) -> Nvfp4Weight:
        self._refuse_other_suffixes(_MODELOPT_SUFFIXES, "an NVFP4 weight as ModelOpt writes it")
        self.require("weight_scale_2", "a packed uint8 weight needs its global scale, as NVFP4 has it")
        return Nvfp4Weight(
            packed=self._packed("weight"),
            scale=self._block_scale(),
            global_scale=self._required_scalar("weight_scale_2"),
            input_scale=self._scalar("input_scale"),
            bias=bias,
            name=self.prefix,
        )

    def compressed_nvfp4(self, bias: torch.Tensor | None) -> Nvfp4Weight:
        self._refuse_other_suffixes(_COMPRESSED_SUFFIXES, "an NVFP4 weight as compressed-tensors writes it")
        self.require("weight_global_scale", "a packed weight needs its global scale, as NVFP4 has it")
        input_scale = self._scalar("input_global_scale")
        return Nvfp4Weight(
            packed=self._packed("weight_packed"),
            scale=self._block_scale(),
            # compressed-tensors divides by its global scales; here they multiply.
            global_scale=self._required_scalar("weight_global_scale").reciprocal(),
            input_scale=None if input_scale is None else input_scale.reciprocal(),
            bias=bias,
            name=self.prefix,
        )

    def entry(self, suffix: str) -> TensorEntry | None:
        return self.source.entry(f"{self.prefix}.{suffix}")

    def require(self, suffix: str, why: str = "") -> TensorEntry:
        entry = self.entry(suffix)
        if entry is not None:
            return entry
        alone = sorted(name for name in _KNOWN_SUFFIXES if self.entry(name) is not None)
        if suffix == "weight" and alone:
            why = f"{self.prefix}.{alone[0]} is there without its weight"
        raise WeightsError(f"tensor {self.prefix}.{suffix} is missing" + (f": {why}" if why else ""))

    def floats(self, suffix: str, shape: tuple[int, ...]) -> torch.Tensor:
        return take_floats(self.source, self.require(suffix), shape)

    def _packed(self, suffix: str) -> torch.Tensor:
        if self.in_features % BLOCK_COLUMNS:
            raise WeightsError(
                f"tensor {self.prefix}.{suffix} is packed as NVFP4, but the layer has {self.in_features} in-features; "
                f"expected a multiple of {BLOCK_COLUMNS}"
            )
        return self._exact(suffix, "U8", (self.out_features, self.in_features // 2))

    def _block_scale(self) -> torch.Tensor:
        entry = self.require("weight_scale", "NVFP4 needs a scale for each 16 columns")
        scale = self._exact("weight_scale", "F8_E4M3", (self.out_features, self.in_features // BLOCK_COLUMNS))
        # All bits set after the sign is e4m3's only not-a-number.
        if ((scale.view(torch.uint8) & 0x7F) == 0x7F).any():
            raise WeightsError(f"{entry.file.name}: tensor {entry.name} holds values that are not numbers")
        return scale

    def _exact(self, suffix: str, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
        entry = self.require(suffix)
        if entry.dtype != dtype or entry.shape != shape:
            raise WeightsError(
                f"{entry.file.name}: tensor {entry.name} is {entry.dtype} {list(entry.shape)}; "
                f"expected {dtype} {list(shape)}"
            )
        return self.source.take(entry)

    def _required_scalar(self, suffix: str) -> torch.Tensor:
        value = self._scalar(suffix)
        assert value is not None, "the caller has required it"
        return value

    def _scalar(self, suffix: str) -> torch.Tensor | None:
        entry = self.entry(suffix)
        if entry is None:
            return None
        return take_positive_scalar(self.source, entry)

    def _refuse_other_suffixes(self, expected: frozenset[str], what: str) -> None:
        for suffix in sorted(_KNOWN_SUFFIXES - expected):
            entry = self.entry(suffix)
            if entry is not None:
                raise WeightsError(f"{entry.file.name}: tensor {entry.name} does not belong to {what}, and is not used")


def take_positive_scalar(source: TensorSource, entry: TensorEntry, expected: str = "one value") -> torch.Tensor:
    """A scale, [] float32. Raises WeightsError that names the tensor and says what was expected of its shape."""
    if entry.shape not in ((), (1,), (1, 1)):
        raise WeightsError(f"{entry.file.name}: tensor {entry.name} has shape {list(entry.shape)}; expected {expected}")
    return _take_positive(source, entry).view(())


def _take_positive(source: TensorSource, entry: TensorEntry) -> torch.Tensor:
    if entry.dtype not in DENSE_DTYPES:
        raise WeightsError(f"{entry.file.name}: tensor {entry.name} is {entry.dtype}; expected F32, BF16 or F16")
    value = source.take(entry).float()
    if not (torch.isfinite(value) & (value > 0)).all():
        raise WeightsError(
            f"{entry.file.name}: tensor {entry.name} holds a scale that is zero, negative, infinite or not a "
            "number; expected a positive one"
        )
    return value


def take_floats(source: TensorSource, entry: TensorEntry, shape: tuple[int, ...] | None) -> torch.Tensor:
    """A tensor that is not quantised, of `shape` where one is given. Raises WeightsError."""
    if entry.dtype not in DENSE_DTYPES:
        raise WeightsError(
            f"{entry.file.name}: tensor {entry.name} is {entry.dtype}; expected float32, bfloat16 or float16"
        )
    if shape is not None and entry.shape != shape:
        raise WeightsError(
            f"{entry.file.name}: tensor {entry.name} has shape {list(entry.shape)}; expected {list(shape)}"
        )
    return source.take(entry)
