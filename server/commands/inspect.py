"""`dalsegno inspect`: what a checkpoint is, and how a device's memory would be divided to serve it."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from server.commands.memory_table import print_plan, size_text
from server.commands.options import with_settings
from server.configuration import ConfigurationError, Resolved
from server.settings import Settings

if TYPE_CHECKING:
    from engine.device_plan import DevicePlan
    from engine.kernels.device import DeviceTraits
    from engine.memory import Ram
    from engine.models.config import ModelConfig
    from engine.weights.inspect import CheckpointSummary

_UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


@with_settings("engine", "cache", model="argument")
def inspect(
    resolved: Resolved,
    device: Annotated[
        Literal["cpu", "cuda"] | None,
        typer.Option(help="print how the memory of this device would be divided, without loading the model"),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            help="plan for this GPU, which need not be here: rtx4090, rtx5090, h100, rtxpro6000, h200, or a compute "
            "capability such as 9.0 with --memory",
            metavar="NAME",
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            help="memory to fill, e.g. 8GiB, with a GPU all that it has; default: what is free now", metavar="SIZE"
        ),
    ] = None,
    ram: Annotated[
        str | None, typer.Option(help="plan for a machine with so much RAM; default: this one's", metavar="SIZE")
    ] = None,
    context: Annotated[
        int | None, typer.Option(min=1, help="tokens of each conversation; default: the model's most")
    ] = None,
) -> None:
    """Show a model's architecture, formats and sizes, and how many conversations fit in a given memory."""
    memory_bytes = None if memory is None else parse_size(memory)
    ram_bytes = None if ram is None else parse_size(ram, "--ram")
    if gpu is not None and device == "cpu":
        raise ConfigurationError(f"--gpu is {gpu!r}, but --device is cpu; give one of them")
    from engine.catalog import resolve_model
    from engine.models.registry import read_config
    from engine.weights.inspect import inspect_checkpoint

    folder = resolve_model(resolved.settings.server.model)
    config = read_config(folder)
    summary = inspect_checkpoint(folder)
    longest = config.max_position_embeddings
    if context is not None and context > longest:
        raise ConfigurationError(f"--context is {context}; expected at most {longest}, the model's longest")
    rows = _model_rows(config, summary)
    if device is None and gpu is None:
        rows += _memory_rows(config, summary, resolved.settings, memory_bytes, context or longest)
        _print_rows(rows)
        return
    target = _target("cpu" if device == "cpu" else "cuda", gpu, memory_bytes)
    plan, machine = _plan(folder, config, resolved.settings, target, context, ram_bytes)
    _print_rows(rows)
    print_plan(plan, machine)


@dataclass(frozen=True, slots=True)
class _Target:
    """The device that is planned for."""

    traits: DeviceTraits
    total_bytes: int
    free_bytes: int | None
    """None where the device is not here."""
    element_bytes: int


def _target(device: Literal["cpu", "cuda"], gpu: str | None, memory_bytes: int | None) -> _Target:
    """Raises ConfigurationError where a GPU is asked for that is neither here nor named."""
    import torch

    from engine.gpus import find_gpu_traits
    from engine.kernels.device import CPU
    from engine.kernels.select import find_gpu, gpu_device, gpu_trouble
    from engine.memory import available_memory_bytes

    if device == "cpu":
        total = available_memory_bytes(torch.device("cpu")) if memory_bytes is None else memory_bytes
        return _Target(CPU, total, total, torch.float32.itemsize)
    if gpu is not None:
        traits = find_gpu_traits(gpu, memory_bytes)
        return _Target(traits, traits.total_bytes, None, torch.bfloat16.itemsize)
    trouble = gpu_trouble()
    if trouble is not None:
        raise ConfigurationError(f"--device is cuda, but {trouble}; or name a GPU to plan for, e.g. --gpu h200")
    traits = find_gpu()
    if memory_bytes is not None:
        return _Target(traits, memory_bytes, None, torch.bfloat16.itemsize)
    return _Target(traits, traits.total_bytes, available_memory_bytes(gpu_device()), torch.bfloat16.itemsize)


def _plan(
    folder: Path,
    config: ModelConfig,
    settings: Settings,
    target: _Target,
    context: int | None,
    ram_bytes: int | None,
) -> tuple[DevicePlan, Ram]:
    from engine.device_plan import plan_device
    from engine.memory import Ram, system_ram
    from server.daemon import engine_options

    options = engine_options(settings)
    if context is not None and options.max_context is None:
        options = replace(options, max_context=context)
    ram = system_ram() if ram_bytes is None else Ram(ram_bytes, ram_bytes)
    plan = plan_device(
        folder,
        config,
        options,
        target.traits,
        total_bytes=target.total_bytes,
        free_bytes=target.free_bytes,
        element_bytes=target.element_bytes,
        ram=ram,
    )
    return plan, ram


def parse_size(text: str, flag: str = "--memory") -> int:
    """ "8GiB" -> bytes. Raises ConfigurationError."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]+)\s*", text)
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None:
        raise ConfigurationError(f"{flag} is {text!r}; expected a size such as 512MiB, 8GiB or 80GB")
    return int(float(match[1]) * unit)


def _model_rows(config: ModelConfig, summary: CheckpointSummary) -> list[tuple[str, str]]:
    attention, gdn = config.attention, config.gated_delta_net
    rows = [
        ("folder", str(summary.folder)),
        ("architecture", config.architecture),
        (
            "layers",
            f"{config.num_layers}: {config.num_linear_layers} gated delta net, "
            f"{config.num_attention_layers} full attention",
        ),
        ("hidden, vocabulary", f"{config.hidden_size:,}, {config.vocab_size:,}"),
        (
            "attention heads",
            f"{attention.num_q_heads} query, {attention.num_kv_heads} key/value, of {attention.head_dim}",
        ),
    ]
    if gdn is not None:
        rows.append(
            (
                "gated delta net heads",
                f"{gdn.num_k_heads} key of {gdn.key_head_dim}, {gdn.num_v_heads} value of {gdn.value_head_dim}",
            )
        )
    rows.append(("longest context", f"{config.max_position_embeddings:,} tokens"))
    rows.append(("parameters", f"{summary.parameters:,}"))
    for part in summary.formats:
        rows.append(
            (f"  {part.name}", f"{part.tensors} tensors, {part.parameters:,} parameters, {size_text(part.nbytes)}")
        )
    rows.append(("files", ", ".join(f"{name} ({size_text(nbytes)})" for name, nbytes in summary.shards)))
    return rows


def _memory_rows(
    config: ModelConfig, summary: CheckpointSummary, settings: Settings, memory_bytes: int | None, context: int
) -> list[tuple[str, str]]:
    import torch

    from engine.kernels.select import gpu_device, gpu_trouble
    from engine.memory import available_memory_bytes

    on_cpu = settings.engine.backend == "torch" or gpu_trouble() is not None
    if memory_bytes is None:
        memory_bytes = available_memory_bytes(torch.device("cpu") if on_cpu else gpu_device())
    page_size = settings.cache.page_size
    if page_size == "auto":
        page_size = 16 if on_cpu else 64
    element_bytes = (torch.float32 if on_cpu else torch.bfloat16).itemsize
    kv_element_bytes = 1 if settings.cache.kv_cache_dtype == "fp8" else element_bytes
    page_bytes = page_size * config.kv_bytes_per_token(kv_element_bytes)
    state_bytes = config.state_image_bytes(element_bytes)
    conversation_bytes = -(-context // page_size) * page_bytes + state_bytes
    left = max(0, memory_bytes - summary.nbytes)
    rows = [
        ("state image", f"{size_text(state_bytes)} per conversation" if state_bytes else "none: no recurrent layers"),
        (f"KV page of {page_size} tokens", size_text(page_bytes)),
        (f"conversation of {context:,} tokens", size_text(conversation_bytes)),
        (
            f"conversations in {size_text(memory_bytes)}",
            f"{left // max(1, conversation_bytes):,}, beside the weights of {size_text(summary.nbytes)} as stored",
        ),
    ]
    if state_bytes and page_bytes:
        rows.insert(1, ("  is the KV of", f"{state_bytes * page_size // page_bytes:,} tokens"))
    return rows


def _print_rows(rows: list[tuple[str, str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    for name, value in rows:
        table.add_row(name, value)
    Console(highlight=False, markup=False).print(table)
