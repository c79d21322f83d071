"""How long a state image and a checkpoint take within the device, to host memory, and back."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from bench.gpu.report import Report, figure_of
from bench.gpu.roofline import Peaks
from bench.gpu.timing import seconds_of
from bench.gpu.trials import Trial, judge
from cache import Copy, CopyObject, Tier, UnitHandle
from engine.models.config import ModelConfig
from engine.storage import Storage, allocate_host_memory, allocate_state

SECTION = "copies"


@torch.inference_mode()
def run_copies(
    config: ModelConfig,
    device: torch.device,
    peaks: Peaks,
    report: Report,
    *,
    page_size: int = 64,
    tokens: int = 2048,
    rounds: int = 15,
) -> None:
    """By `engine.storage`, in the layouts of the whole model: one state image, and one with the pages of `tokens`."""
    pages = -(-tokens // page_size)
    dtype = torch.bfloat16
    state = allocate_state(config, num_pages=2 * pages, page_size=page_size, num_slots=2, dtype=dtype, device=device)
    for tensor in (*state.kv, *state.conv, *state.recurrent):
        tensor[: len(tensor) // 2].normal_()
    page_bytes = page_size * config.kv_bytes_per_token(dtype.itemsize)
    units_of_state = -(-config.state_image_bytes(dtype.itemsize) // page_bytes)
    host = allocate_host_memory(units_of_state + pages, page_bytes, device)
    storage = Storage(state, host)
    image = _device(0), _device(1)
    in_host = UnitHandle(Tier.HOST, tuple(range(units_of_state)))
    out = [Copy(CopyObject.STATE, image[0], in_host), *_pages(range(pages), units_of_state, is_out=True)]
    back = [Copy(CopyObject.STATE, in_host, image[1]), *_pages(range(pages, 2 * pages), units_of_state, is_out=False)]
    storage.run([*out, *back])
    report.compared(
        judge(
            SECTION,
            Trial("checkpoint to host memory and back", f"{pages} pages and a state", lambda _: {}, 0.0),
            {str(i): half.float().cpu() for i, half in enumerate(_halves(storage, 0))},
            {str(i): half.float().cpu() for i, half in enumerate(_halves(storage, 1))},
        )
    )
    link = _link_bytes_per_second(device, report, rounds)
    name = f"{pages} pages and a state"
    for what, copies, rate in (
        ("state image within the device", [Copy(CopyObject.STATE, *image)], peaks.bytes_per_second / 2),
        ("state image to host memory", out[:1], link[0]),
        ("state image from host memory", back[:1], link[1]),
        (f"{name} ({tokens} tokens) to host memory", out, link[0]),
        (f"{name} ({tokens} tokens) from host memory", back, link[1]),
    ):
        moved = storage.run(copies)
        seconds = seconds_of(partial(storage.run, copies), device, rounds=rounds)
        milliseconds = [1e3 * each for each in seconds]
        bound = 1e3 * moved / rate
        report.measured(figure_of(SECTION, what, "ms", milliseconds, bound=bound, note=f"{moved / 2**20:.1f} MiB"))


def _halves(storage: Storage, half: int) -> Sequence[torch.Tensor]:
    tensors = (*storage.state.kv, *storage.state.conv, *storage.state.recurrent)
    return [tensor.chunk(2)[half] for tensor in tensors]


def _device(unit: int) -> UnitHandle:
    return UnitHandle(Tier.DEVICE, (unit,))


def _pages(units: range, first_host_unit: int, *, is_out: bool) -> list[Copy]:
    found = []
    for i, unit in enumerate(units):
        host = UnitHandle(Tier.HOST, (first_host_unit + i,))
        source, destination = (_device(unit), host) if is_out else (host, _device(unit))
        found.append(Copy(CopyObject.KV_PAGE, source, destination))
    return found


def _link_bytes_per_second(device: torch.device, report: Report, rounds: int, size: int = 2**28) -> tuple[float, float]:
    """To host memory and from it, by one large copy of page-locked memory."""
    on_device = torch.empty(size, dtype=torch.uint8, device=device)
    on_host = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    rates = []
    for what, work in (
        ("page-locked copy to host memory", lambda: on_host.copy_(on_device, non_blocking=True)),
        ("page-locked copy from host memory", lambda: on_device.copy_(on_host, non_blocking=True)),
    ):
        seconds = seconds_of(work, device, rounds=rounds)
        figure = figure_of(SECTION, what, "GB/s", [size / each / 1e9 for each in seconds], note=f"{size >> 20} MiB")
        report.measured(figure)
        rates.append(figure.high * 1e9)
    return rates[0], rates[1]
