"""A device's memory from the first byte to the last, before a model is loaded: the driver, the weights, the plan."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from engine.errors import InsufficientMemoryError
from engine.gpus import CONTEXT_BYTES
from engine.kernels.device import DeviceTraits
from engine.memory import MemoryPlan, plan_memory
from engine.models.config import ModelConfig
from engine.options import EngineOptions
from engine.step_memory import Part
from engine.system_memory import Ram
from engine.weight_sizes import WeightSizes, size_weights


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """What a daemon would do with a device's memory."""

    traits: DeviceTraits
    taken: Part
    """What is not there to be divided: the driver's, or other processes'."""
    weights: WeightSizes
    memory: MemoryPlan

    @property
    def total_bytes(self) -> int:
        return self.taken.nbytes + self.weights.nbytes + self.memory.available_bytes


def plan_device(
    folder: Path,
    config: ModelConfig,
    options: EngineOptions,
    traits: DeviceTraits,
    *,
    total_bytes: int,
    free_bytes: int | None = None,
    element_bytes: int,
    ram: Ram,
) -> DevicePlan:
    """Plan the model in `folder`, of which only headers are read. `free_bytes` is what a device that is here can still
    give; without it, a GPU's driver is taken for granted to need CONTEXT_BYTES.

    Raises what `plan_memory` and `size_weights` do, and InsufficientMemoryError for weights that cannot be loaded.
    """
    if free_bytes is not None:
        taken = Part("in use", total_bytes - free_bytes, "by the driver and others, at this moment")
    elif traits.is_cuda:
        taken = Part("driver", min(CONTEXT_BYTES, total_bytes), "its context and libraries, an estimate")
    else:
        taken = Part("in use", 0, "not known")
    weights = size_weights(folder, config, traits, element_bytes, options.activations)
    room = total_bytes - taken.nbytes
    check_weights(weights, room, traits)
    memory = plan_memory(
        config,
        options,
        room - weights.nbytes,
        element_bytes=element_bytes,
        device_type="cuda" if traits.is_cuda else "cpu",
        ram=ram,
    )
    return DevicePlan(traits, taken, weights, memory)


def check_weights(weights: WeightSizes, available_bytes: int, traits: DeviceTraits) -> None:
    """Raises InsufficientMemoryError where the weights cannot lie on the device, or not be brought there."""
    if weights.nbytes > available_bytes:
        purpose = f"keeping the weights on {traits.name}"
        raise InsufficientMemoryError("the model's size", weights.nbytes, available_bytes, purpose)
    if weights.peak_bytes > available_bytes:
        purpose = "loading the weights, the largest block of layers twice over,"
        raise InsufficientMemoryError("the model's size", weights.peak_bytes, available_bytes, purpose)
