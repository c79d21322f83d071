"""`dalsegno doctor`: looks at everything that `serve` needs, and says what to do about what is missing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum

import typer

from engine.errors import EngineError
from server.commands.options import with_settings
from server.configuration import ConfigurationError, Resolved
from server.exit_codes import ExitCode, exit_code_of
from server.listener import PortTakenError, listen
from server.settings import Settings

_LITTLE_MEMORY_BYTES = 2**30


class Verdict(StrEnum):
    """How a finding stands; only BAD would stop `serve`."""

    OK = "ok"
    NOTE = "note"
    BAD = "bad"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. `advice` says what to do, empty where nothing is to be done."""

    subject: str
    verdict: Verdict
    what: str
    advice: str = ""
    exit_code: ExitCode = ExitCode.OK


@with_settings("server", "engine", "cache", model="argument")
def doctor(resolved: Resolved) -> None:
    """Check Python, torch, threads, memory, GPU, flashinfer, port and model; fails when `serve` would."""
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
    """Every check, one after the other."""
    checks: tuple[Callable[[Settings], Finding], ...] = (
        _check_python,
        _check_torch,
        _check_threads,
        _check_memory,
        _check_gpu,
        _check_flashinfer,
        _check_port,
        _check_model,
    )
    for check in checks:
        yield check(settings)


def _check_python(_settings: Settings) -> Finding:
    found = f"{platform.python_version()} at {sys.executable}"
    return Finding("python", Verdict.OK, found)  # an older one could not have imported this


def _check_torch(_settings: Settings) -> Finding:
    try:
        import torch
    except (ImportError, OSError) as error:
        return Finding("torch", Verdict.BAD, f"cannot be imported: {error}", "pip install torch", ExitCode.FAILED)
    return Finding("torch", Verdict.OK, torch.__version__)


def _check_threads(_settings: Settings) -> Finding:
    import torch

    threads, cores = torch.get_num_threads(), len(os.sched_getaffinity(0))
    found = f"{threads} for {cores} cores"
    if threads == cores:
        return Finding("threads", Verdict.OK, found)
    return Finding("threads", Verdict.NOTE, found, "OMP_NUM_THREADS sets them; as many as cores is usually best")


def _check_memory(_settings: Settings) -> Finding:
    import torch

    from engine.memory import available_memory_bytes

    available = available_memory_bytes(torch.device("cpu"))
    found = f"{available / 2**30:.1f} GiB free"
    if available >= _LITTLE_MEMORY_BYTES:
        return Finding("memory", Verdict.OK, found)
    return Finding("memory", Verdict.NOTE, found, "little; lower --kv-cache-mib and --max-concurrency")


def _check_gpu(_settings: Settings) -> Finding:
    import torch

    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        name = torch.cuda.get_device_name()
        return Finding("gpu", Verdict.OK, f"{name}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free")
    return Finding("gpu", Verdict.NOTE, "none that torch can use", "the CPU serves; no need to do anything")


def _check_flashinfer(_settings: Settings) -> Finding:
    if importlib.util.find_spec("flashinfer") is None:
        return Finding("flashinfer", Verdict.NOTE, "not installed", "only a GPU needs it: pip install 'dalsegno[cuda]'")
    return Finding("flashinfer", Verdict.OK, importlib.metadata.version("flashinfer-python"))


def _check_port(settings: Settings) -> Finding:
    host, port = settings.server.host, settings.server.port
    try:
        listen(host, port).close()
    except (PortTakenError, ConfigurationError) as error:
        return Finding("port", Verdict.BAD, str(error), "see --host and --port", exit_code_of(error))
    return Finding("port", Verdict.OK, f"{port} on {host} is free")


def _check_model(settings: Settings) -> Finding:
    """Everything that can be told without reading the weights."""
    from engine.catalog import resolve_model
    from engine.kernels.select import select_kernels
    from engine.memory import available_memory_bytes, plan_memory, system_ram
    from engine.models.registry import read_config
    from engine.text.chat_template import ChatTemplate
    from engine.text.tokenizer import Tokenizer
    from engine.weights.inspect import inspect_checkpoint
    from server.daemon import engine_options

    try:
        folder = resolve_model(settings.server.model)
        config = read_config(folder)
        summary = inspect_checkpoint(folder)
        Tokenizer.load(folder)
        template = ChatTemplate.load(folder)
        kernels = select_kernels(settings.engine.backend)
        available = available_memory_bytes(kernels.device) - summary.nbytes
        options = engine_options(settings)
        plan = plan_memory(
            config,
            options,
            available,
            element_bytes=kernels.dtype.itemsize,
            device_type=kernels.device.type,
            ram=system_ram(),
        )
    except EngineError as error:
        return Finding("model", Verdict.BAD, str(error), "see the message", exit_code_of(error))
    found = f"{folder} ({config.architecture}); {plan.describe()}"
    if template is None:
        return Finding("model", Verdict.NOTE, found, "it has no chat template, so it cannot answer conversations")
    return Finding("model", Verdict.OK, found)


def _plain(text: str) -> str:
    return text.replace("[", "\\[")
