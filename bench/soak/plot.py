"""Draws a soak: occupancy of each pool, reuse and resident memory over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.soak.observer import Sample

_LABELS = {
    "device_state_slots": "state slots on the device",
    "device_kv_pages": "KV pages on the device",
    "host_state_slots": "state images in host memory",
    "host_units": "host memory",
}


def draw(samples: Sequence[Sample], path: Path, title: str) -> None:
    """Write a PNG. Nothing is drawn of fewer than two samples."""
    if len(samples) < 2:
        return
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    minutes = [sample.seconds / 60 for sample in samples]
    figure = Figure(figsize=(11, 9), layout="constrained")
    FigureCanvasAgg(figure)
    occupancy, reuse, memory = figure.subplots(3, 1, sharex=True, height_ratios=(2, 1.4, 1))
    figure.suptitle(title)
    for number, pool in enumerate(samples[-1].occupied):
        occupied = [100 * sample.occupied.get(pool, 0) for sample in samples]
        pinned = [100 * sample.pinned.get(pool, 0) for sample in samples]
        colour = f"C{number}"
        occupancy.plot(minutes, occupied, color=colour, label=_LABELS.get(pool, pool))
        occupancy.plot(minutes, pinned, color=colour, linestyle=":", linewidth=1)
    occupancy.set_ylabel("held, % of the pool\n(dotted: by requests and copies)")
    occupancy.set_ylim(0, 104)
    occupancy.legend(loc="lower right")
    for label, rates in (
        ("of the prompt tokens", [sample.hit_rate for sample in samples]),
        ("of the achievable tokens", [sample.achieved for sample in samples]),
    ):
        reuse.plot(minutes, [float("nan") if rate is None else 100 * rate for rate in rates], label=label)
    reuse.set_ylabel("reused, %")
    reuse.set_ylim(0, 104)
    reuse.legend(loc="lower right")
    memory.plot(minutes, [sample.rss_bytes / 2**20 for sample in samples], color="C4")
    memory.set_ylabel("resident memory, MiB")
    memory.set_xlabel("minutes")
    memory.set_ylim(bottom=0)
    for axes in (occupancy, reuse, memory):
        axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
