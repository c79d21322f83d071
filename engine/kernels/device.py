"""What a GPU is, as far as the choice of kernels and the division of memory ask."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class DeviceTraits:
    """One device. A GPU that is only planned for has traits too; kernels are chosen by these alone."""

    name: str
    capability: tuple[int, int] | None
    """CUDA's compute capability, such as (9, 0); None for a CPU."""
    total_bytes: int = 0
    multiprocessors: int = 0

    @property
    def is_cuda(self) -> bool:
        return self.capability is not None

    @property
    def architecture(self) -> str:
        """As CUDA's compiler names it: `sm90`; `cpu` without a GPU."""
        return "cpu" if self.capability is None else f"sm{self.capability[0]}{self.capability[1]}"


CPU = DeviceTraits("CPU", None)


def read_traits(device: torch.device) -> DeviceTraits:
    """Ask the driver."""
    if device.type != "cuda":
        return CPU
    properties = torch.cuda.get_device_properties(device)
    return DeviceTraits(
        name=properties.name,
        capability=(properties.major, properties.minor),
        total_bytes=properties.total_memory,
        multiprocessors=properties.multi_processor_count,
    )
