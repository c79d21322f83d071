"""`dalsegno inspect`: what a checkpoint is, what it takes in memory, and how many conversations fit."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

import typer

from server.commands.options import with_settings
from server.configuration import ConfigurationError, Resolved

if TYPE_CHECKING:
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


@with_settings("cache", model="argument")
def inspect(
    resolved: Resolved,
    memory: Annotated[
        str | None, typer.Option(help="memory to fill, e.g. 8GiB; default: what is free now", metavar="SIZE")
    ] = None,
    context: Annotated[
        int | None, typer.Option(min=1, help="tokens of each conversation; default: the model's most")
    ] = None,
) -> None:
    """Show a model's architecture, formats and sizes, and how many conversations fit in a given memory."""
    memory_bytes = None if memory is None else parse_size(memory)
    from engine.catalog import resolve_model
    from engine.kernels.select import select_kernels
    from engine.memory import available_memory_bytes
    from engine.models.registry import read_config
    from engine.weights.inspect import inspect_checkpoint

    folder = resolve_model(resolved.settings.server.model)
    config = read_config(folder)
    summary = inspect_checkpoint(folder)
    kernels = select_kernels("auto")
    if memory_bytes is None:
        memory_bytes = available_memory_bytes(kernels.device)
    page_size = resolved.settings.cache.page_size
    if page_size == "auto":
        page_size = 16 if kernels.device.type == "cpu" else 64
    longest = config.max_position_embeddings
    if context is not None and context > longest:
        raise ConfigurationError(f"--context is {context}; expected at most {longest}, the model's longest")
    rows = _model_rows(config, summary)
    rows += _memory_rows(config, summary, memory_bytes, context or longest, page_size, kernels.dtype.itemsize)
    _print_rows(rows)


def parse_size(text: str) -> int:
    """ "8GiB" -> bytes. Raises ConfigurationError."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]+)\s*", text)
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None:
        raise ConfigurationError(f"--memory is {text!r}; expected a size such as 512MiB, 8GiB or 80GB")
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
        rows.append((f"  {part.name}", f"{part.tensors} tensors, {part.parameters:,} parameters, {_size(part.nbytes)}"))
    rows.append(("files", ", ".join(f"{name} ({_size(nbytes)})" for name, nbytes in summary.shards)))
    return rows


def _memory_rows(
    config: ModelConfig,
    summary: CheckpointSummary,
    memory_bytes: int,
    context: int,
    page_size: int,
    element_bytes: int,
) -> list[tuple[str, str]]:
    page_bytes = page_size * config.kv_bytes_per_token(element_bytes)
    state_bytes = config.state_image_bytes(element_bytes)
    conversation_bytes = -(-context // page_size) * page_bytes + state_bytes
    left = max(0, memory_bytes - summary.nbytes)
    rows = [
        ("state image", f"{_size(state_bytes)} per conversation" if state_bytes else "none: no recurrent layers"),
        (f"KV page of {page_size} tokens", _size(page_bytes)),
        (f"conversation of {context:,} tokens", _size(conversation_bytes)),
        (
            f"conversations in {_size(memory_bytes)}",
            f"{left // max(1, conversation_bytes):,}, beside the weights of {_size(summary.nbytes)} as stored",
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


def _size(nbytes: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= size:
            return f"{nbytes / size:,.2f} {unit}"
    return f"{nbytes:,} B"
