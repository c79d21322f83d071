"""GPUs that memory can be planned for without having one."""

from __future__ import annotations

import re

from engine.errors import UnusableOptionError
from engine.kernels.device import DeviceTraits
from engine.kernels.select import LEAST_CAPABILITY

CONTEXT_BYTES = 2**29
"""Of a GPU's memory, what its driver and libraries take as soon as a process uses it: 0.33 GiB in vLLM's log of an RTX
5090 (`non_torch_memory`). On a GPU that is there, it is no longer free when the plan is made."""

_GIB = 2**30
KNOWN_GPUS = {
    "rtx4090": DeviceTraits("NVIDIA GeForce RTX 4090", (8, 9), int(23.6 * _GIB), 128),
    "rtx5090": DeviceTraits("NVIDIA GeForce RTX 5090", (12, 0), int(31.3 * _GIB), 170),
    "h100": DeviceTraits("NVIDIA H100 80GB", (9, 0), int(79.1 * _GIB), 132),
    "rtxpro6000": DeviceTraits("NVIDIA RTX PRO 6000 Blackwell", (12, 0), int(94.9 * _GIB), 188),
    "h200": DeviceTraits("NVIDIA H200", (9, 0), int(139.7 * _GIB), 132),
}
"""Total memory as torch reports it, which is less than is printed on the box."""


def find_gpu_traits(text: str, total_bytes: int | None = None) -> DeviceTraits:
    """A GPU by its name (`h200`, `RTX PRO 6000`), or by its compute capability (`9.0`), which needs `total_bytes`.

    `total_bytes` overrules what is known. Raises UnusableOptionError that names what is known, or
    what is needed.
    """
    known = KNOWN_GPUS.get(re.sub(r"[^a-z0-9.]", "", text.lower()))
    capability = re.fullmatch(r"([0-9]+)\.([0-9])", text)
    if known is not None:
        return DeviceTraits(known.name, known.capability, total_bytes or known.total_bytes, known.multiprocessors)
    if capability is None:
        raise UnusableOptionError(
            f"--gpu is {text!r}; expected {', '.join(KNOWN_GPUS)}, or a compute capability such as 9.0 with --memory"
        )
    parts = int(capability[1]), int(capability[2])
    if parts < LEAST_CAPABILITY:
        least = f"{LEAST_CAPABILITY[0]}.{LEAST_CAPABILITY[1]}"
        raise UnusableOptionError(f"--gpu is {text}, which no kernel here runs on; expected {least} or newer")
    if total_bytes is None:
        raise UnusableOptionError(f"--gpu {text} says nothing of its memory; give it with --memory, e.g. 80GB")
    return DeviceTraits(f"a GPU of compute capability {text}", parts, total_bytes)
