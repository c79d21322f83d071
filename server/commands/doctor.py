"""`dalsegno doctor`: looks at everything that `serve` needs, and says what to do about what is missing."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from engine.errors import BackendUnavailableError, EngineError
from server.commands.findings import Finding, Verdict
from server.commands.gpu_checks import check_flashinfer, check_gpu, check_triton, kernel_findings, linear_findings
from server.commands.options import with_settings
from server.configuration import ConfigurationError, Resolved
from server.exit_codes import ExitCode, exit_code_of
from server.listener import PortTakenError, listen
from server.settings import Settings

if TYPE_CHECKING:
    from engine.kernels import Kernels
    from engine.models.config import ModelConfig

_LITTLE_MEMORY_BYTES = 2**30


@with_settings("server", "engine", "cache", model="argument")
def doctor(resolved: Resolved) -> None:
    """Check Python, torch, memory, GPU, flashinfer, port, model and kernels; fails when `serve` would."""
    from rich.console import Console
    from rich.table import Table

    findings = list(examine(resolved.settings))
    table = Table("", "what", "found", "what to do", box=None)
    marks = {Verdict.OK: "[green]ok[/]", Verdict.NOTE: "[yellow]note[/]", Verdict.BAD: "[red]bad[/]"}
    for finding in findings:
        table.add_row(marks[finding.verdict], finding.subject, _plain(finding.what), _plain(finding.advice))
    Console(highlight=False).print(table)
    code = next((finding.exit_code for finding in findings if finding.verdict is Verdict.BAD), ExitCode.OK)
    raise typer.Exit(code)


def examine(settings: Settings) -> Iterator[Finding]:
    """Every check, one after the other; without torch there is nothing more to look at."""
    checks: tuple[Callable[[Settings], Iterator[Finding]], ...] = (
        _check_threads,
        _check_memory,
        check_gpu,
        check_flashinfer,
        check_triton,
        _check_port,
        _check_model,
    )
    yield _check_python()
    torch_finding = _check_torch()
    yield torch_finding
    if torch_finding.verdict is Verdict.BAD:
        return
    for check in checks:
        yield from check(settings)


def _check_python() -> Finding:
    found = f"{platform.python_version()} at {sys.executable}"
    return Finding("python", Verdict.OK, found)  # an older one could not have imported this


def _check_torch() -> Finding:
    try:
        import torch
    except (ImportError, OSError) as error:
        return Finding("torch", Verdict.BAD, f"cannot be imported: {error}", "pip install torch", ExitCode.FAILED)
    return Finding("torch", Verdict.OK, torch.__version__)


def _check_threads(_settings: Settings) -> Iterator[Finding]:
    import torch

    from engine.openmp import describe_waiting

    threads, cores = torch.get_num_threads(), len(os.sched_getaffinity(0))
    found = f"{threads} for {cores} cores; {describe_waiting()}"
    if threads == cores:
        yield Finding("threads", Verdict.OK, found)
    else:
        yield Finding("threads", Verdict.NOTE, found, "OMP_NUM_THREADS sets them; as many as cores is usually best")


def _check_memory(_settings: Settings) -> Iterator[Finding]:
    import torch

    from engine.memory import available_memory_bytes

    available = available_memory_bytes(torch.device("cpu"))
    found = f"{available / 2**30:.1f} GiB free"
    if available >= _LITTLE_MEMORY_BYTES:
        yield Finding("memory", Verdict.OK, found)
    else:
        yield Finding("memory", Verdict.NOTE, found, "little; lower --kv-cache-mib and --max-concurrency")


def _check_port(settings: Settings) -> Iterator[Finding]:
    host, port = settings.server.host, settings.server.port
    try:
        listen(host, port).close()
    except (PortTakenError, ConfigurationError) as error:
        yield Finding("port", Verdict.BAD, str(error), "see --host and --port", exit_code_of(error))
    else:
        yield Finding("port", Verdict.OK, f"{port} on {host} is free")


def _check_model(settings: Settings) -> Iterator[Finding]:
    """Everything that can be told without reading the weights, and what would compute with them."""
    from engine.catalog import resolve_model
    from engine.kernels.select import select_kernels
    from engine.models.registry import read_config
    from engine.text.chat_template import ChatTemplate
    from engine.text.tokenizer import Tokenizer

    try:
        folder = resolve_model(settings.server.model)
        config = read_config(folder)
        Tokenizer.load(folder)
        template = ChatTemplate.load(folder)
        kernels = select_kernels(settings.engine.backend, config, settings.engine.activations)
        yield from kernel_findings(kernels.choices)
        if kernels.device.type == "cuda":
            yield from linear_findings(settings)
        memory = _plan_memory(folder, config, settings, kernels)
    except BackendUnavailableError as error:
        yield Finding("kernels", Verdict.BAD, str(error), "see the message", exit_code_of(error))
    except EngineError as error:
        yield Finding("model", Verdict.BAD, str(error), "see the message", exit_code_of(error))
    else:
        found = f"{folder} ({config.architecture}); {memory}"
        if template is None:
            yield Finding("model", Verdict.NOTE, found, "it has no chat template, so it cannot answer conversations")
        else:
            yield Finding("model", Verdict.OK, found)


def _plan_memory(folder: Path, config: ModelConfig, settings: Settings, kernels: Kernels) -> str:
    """How the memory would be divided, in one line. Raises what `serve` would before it loads the weights."""
    from engine.device_plan import plan_device
    from engine.kernels.device import read_traits
    from engine.memory import available_memory_bytes, system_ram
    from server.daemon import engine_options

    traits, free = read_traits(kernels.device), available_memory_bytes(kernels.device)
    return plan_device(
        folder,
        config,
        engine_options(settings),
        traits,
        total_bytes=traits.total_bytes or free,
        free_bytes=free,
        element_bytes=kernels.dtype.itemsize,
        ram=system_ram(),
    ).memory.describe()


def _plain(text: str) -> str:
    return text.replace("[", "\\[")
