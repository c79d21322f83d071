"""Small host tensors to the device, without waiting for what it does."""

from __future__ import annotations

import torch


def upload(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`tensor`, which is on the host, on `device`: itself on the CPU, else by way of page-locked memory of torch's
    allocator, which is not used for anything else before the copy is done."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def upload_into(destination: torch.Tensor, tensor: torch.Tensor) -> None:
    """The same into a tensor that is there."""
    destination.copy_(tensor if destination.device.type == "cpu" else tensor.pin_memory(), non_blocking=True)
