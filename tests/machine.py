"""A machine that is not this one: what torch, the driver and the installed packages say where there is a GPU."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection

import pytest
import torch

from engine.kernels import select
from engine.kernels.device import DeviceTraits

HOPPER = DeviceTraits("H200", (9, 0), 140 * 2**30, 132)
BLACKWELL = DeviceTraits("B200", (10, 0), 178 * 2**30, 148)
TURING = DeviceTraits("T4", (7, 5), 16 * 2**30, 40)


def pretend(
    monkeypatch: pytest.MonkeyPatch,
    *,
    cuda: str | None = "13.0",
    gpu: DeviceTraits | None = None,
    has_driver: bool = True,
    without: Collection[str] = (),
) -> None:
    """`cuda` is what torch is built for, `gpu` what it sees, `without` names packages that are not installed."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda is not None and gpu is not None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (2**30, gpu.total_bytes if gpu else 0))
    monkeypatch.setattr(select, "find_gpu", lambda: gpu)
    monkeypatch.setattr(select, "driver_is_here", lambda: has_driver)
    monkeypatch.setattr(select, "driver_release", lambda: "580.95.05" if has_driver else None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in without else find_spec(name))
