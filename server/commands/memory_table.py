"""The memory plan as `dalsegno inspect --device` prints it: what each line takes, and how it comes about."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.device_plan import DevicePlan
    from engine.memory import MemoryPlan
    from engine.step_memory import Part
    from engine.system_memory import Ram


def print_plan(plan: DevicePlan, ram: Ram) -> None:
    """To standard output, as wide as the terminal."""
    from rich.console import Console
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column()
    for name, nbytes, how in plan_rows(plan, ram):
        table.add_row(name, f"{nbytes:,}", size_text(nbytes), how)
    console = Console(highlight=False, markup=False)
    console.print(f"\nmemory of {plan.traits.name} ({plan.traits.architecture}), in bytes")
    console.print(table)
    console.print(f"\n{_fitting(plan.memory)}")


def plan_rows(plan: DevicePlan, ram: Ram) -> Iterable[tuple[str, int, str]]:
    """Name, bytes and how they come about. On the device, the lines that are not indented add up to the first."""
    memory, weights = plan.memory, plan.weights
    yield "device", plan.total_bytes, "all of its memory" if plan.traits.is_cuda else "what is free now, or was given"
    yield _row(plan.taken)
    yield "weights", weights.nbytes, "as they lie on the device, told from the headers"
    yield from map(_row, weights.parts)
    yield from map(_row, memory.parts())
    peak = f"the weights, and the largest block of layers twice over: {weights.staging_bytes:,}"
    yield "while loading", weights.peak_bytes, peak
    yield "RAM", ram.total_bytes, f"{ram.available_bytes:,} available"
    locked = "" if not plan.traits.is_cuda else ", page-locked"
    yield "host cache", memory.host_bytes, f"{memory.describe_host()}{locked if memory.host_units else ''}"


def size_text(nbytes: int) -> str:
    """For people: `8.00 GiB`."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= size:
            return f"{nbytes / size:,.2f} {unit}"
    return f"{nbytes:,} B"


def _row(part: Part) -> tuple[str, int, str]:
    return part.name, part.nbytes, part.how + (f" ({part.flag})" if part.flag else "")


def _fitting(memory: MemoryPlan) -> str:
    return (
        f"context {memory.max_context_tokens:,} tokens; {memory.kv_pages * memory.page_size:,} tokens of KV on the "
        f"device; {memory.describe_room()}"
    )
