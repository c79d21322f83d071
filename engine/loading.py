"""From a checkpoint's folder to the parts of an engine: kernels, weights, memory, and what runs the steps."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from cache import Faults
from engine.copier import Copier, CudaStream, ImmediateCopier, StreamCopier
from engine.device_plan import plan_device
from engine.errors import InsufficientMemoryError
from engine.graphs import DecodeGraphs
from engine.kernels import KernelChoice, Kernels
from engine.kernels.device import read_traits
from engine.kernels.select import select_kernels
from engine.memory import MemoryPlan, available_memory_bytes, plan_memory, system_ram
from engine.models.config import ModelConfig
from engine.models.registry import Model, load_model, read_config
from engine.openmp import describe_waiting
from engine.options import EngineOptions
from engine.runner import Runner
from engine.storage import ModelState, Storage, allocate_host_memory, allocate_state
from engine.text.chat_template import ChatTemplate
from engine.text.encoder import TextEncoder
from engine.text.tokenizer import Tokenizer
from engine.warm_up import warm_up

logger = logging.getLogger("dalsegno.engine")


@dataclass(frozen=True, slots=True)
class EngineParts:
    """What an engine is made of."""

    config: ModelConfig
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    chat_encoder: TextEncoder | None
    """Of what the template writes."""
    memory: MemoryPlan
    runner: Runner
    kernel_choices: tuple[KernelChoice, ...]
    faults: Faults
    """Those that `runner` asks."""


def load_parts(folder: Path, options: EngineOptions) -> EngineParts:
    """Read a checkpoint in Hugging Face layout and allocate its memory. Blocking.

    Raises ModelLoadError, ChatTemplateError, BackendUnavailableError or InsufficientMemoryError.
    """
    config = read_config(folder)
    tokenizer = Tokenizer.load(folder)
    chat_template = ChatTemplate.load(folder, () if options.parse_special_tokens else tokenizer.control_tokens)
    chat_encoder = None if chat_template is None else _encoder_of(chat_template, tokenizer, options)
    kernels = select_kernels(options.backend, config, options.activations)
    model, memory = _load_weights(folder, config, options, kernels)
    logger.info(memory.describe())
    if options.kv_cache_dtype == "fp8" and not model.has_kv_scales:
        logger.warning("fp8 KV pages: the checkpoint has no scales for them, so 1 is taken; what is over 448 saturates")
    state = _allocate_state(config, options, memory, kernels)
    with _telling_of_memory("--host-cache-mib", memory.host_bytes, "the host cache", torch.device("cpu")):
        host = allocate_host_memory(memory.host_units, memory.host_unit_bytes, kernels.device)
    graphs = _capture_decodes(model, kernels, state, memory, options)
    storage, faults = Storage(state, host), Faults()
    copier = _make_copier(storage, kernels, faults)
    runner = Runner(model, kernels, storage, memory.page_size, faults, copier=copier, graphs=graphs)
    choices = (*kernels.choices, *([] if graphs is None else [graphs.choice]))
    _tell_of_kernels(kernels, choices)
    if _is_on_gpu(kernels):
        warm_up(runner, memory)
    return EngineParts(
        config=config,
        tokenizer=tokenizer,
        chat_template=chat_template,
        chat_encoder=chat_encoder,
        memory=memory,
        runner=runner,
        kernel_choices=choices,
        faults=faults,
    )


def _encoder_of(template: ChatTemplate, tokenizer: Tokenizer, options: EngineOptions) -> TextEncoder:
    if options.parse_special_tokens:
        return tokenizer.text_encoder
    composed = template.composed_tokens
    if composed:
        logger.warning(
            "the chat template puts %s together from parts, so these tokens cannot be told from those in a message: "
            "they are parsed wherever they stand",
            ", ".join(sorted(composed)),
        )
    return tokenizer.chat_encoder(template.stand_ins, composed)


def _load_weights(
    folder: Path, config: ModelConfig, options: EngineOptions, kernels: Kernels
) -> tuple[Model, MemoryPlan]:
    """Plan by the headers, so that what cannot fit is refused before minutes of loading; load; plan by what is left."""
    device, element_bytes = kernels.device, kernels.dtype.itemsize
    free = available_memory_bytes(device)
    traits = read_traits(device)
    foreseen = plan_device(
        folder,
        config,
        options,
        traits,
        total_bytes=traits.total_bytes or free,
        free_bytes=free,
        element_bytes=element_bytes,
        ram=system_ram(),
    )
    with _telling_of_memory("what else uses memory here", foreseen.weights.nbytes, "the weights' checkpoint", device):
        model = load_model(folder, kernels)
    room = available_memory_bytes(device)
    memory = plan_memory(config, options, room, element_bytes=element_bytes, device_type=device.type, ram=system_ram())
    return model, memory


def _allocate_state(config: ModelConfig, options: EngineOptions, memory: MemoryPlan, kernels: Kernels) -> ModelState:
    needed = memory.kv_bytes + memory.state_bytes
    with _telling_of_memory("--kv-cache-mib", needed, "the KV cache with the states", kernels.device):
        return allocate_state(
            config,
            num_pages=memory.kv_pages,
            page_size=memory.page_size,
            num_slots=memory.state_slots,
            dtype=kernels.dtype,
            device=kernels.device,
            kv_dtype=torch.float8_e4m3fn if options.kv_cache_dtype == "fp8" else None,
        )


def _capture_decodes(
    model: Model, kernels: Kernels, state: ModelState, memory: MemoryPlan, options: EngineOptions
) -> DecodeGraphs | None:
    """None on the CPU, where there is nothing to capture."""
    if not _is_on_gpu(kernels):
        return None
    pages_of_context = -(-memory.max_context_tokens // memory.page_size)
    graphs = DecodeGraphs(
        model,
        kernels,
        state,
        page_size=memory.page_size,
        max_batch=options.max_concurrency,
        max_pages=options.max_concurrency * pages_of_context,
    )
    graphs.capture()
    return graphs


def _make_copier(storage: Storage, kernels: Kernels, faults: Faults) -> Copier:
    if not _is_on_gpu(kernels):
        return ImmediateCopier(storage.run, faults)
    return StreamCopier(storage.queue, CudaStream(kernels.device), faults)


def _is_on_gpu(kernels: Kernels) -> bool:
    return kernels.device.type == "cuda"


def _tell_of_kernels(kernels: Kernels, choices: tuple[KernelChoice, ...]) -> None:
    logger.info("threads: %d; %s", torch.get_num_threads(), describe_waiting())
    for choice in choices:
        why = f" ({choice.reason})" if choice.reason else ""
        logger.info("kernels: %s by %s%s", choice.kernel, choice.implementation, why)
    for line in kernels.describe_layers():
        logger.info("linear layers: %s", line)


@contextmanager
def _telling_of_memory(flag: str, needed_bytes: int, purpose: str, device: torch.device) -> Iterator[None]:
    """What the plan took for granted and the system refused, e.g. under another process's pressure."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "allocate" not in str(error):
            raise
        raise InsufficientMemoryError(flag, needed_bytes, available_memory_bytes(device), purpose) from error
