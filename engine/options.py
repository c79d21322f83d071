"""What an operator may choose about the engine. Names and defaults are those of the command line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from engine.kernels.select import Backend

Activations: TypeAlias = Literal["auto", "bf16", "fp4"]
KvCacheDtype: TypeAlias = Literal["auto", "fp8"]


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The `engine.` and `cache.` keys of the configuration; None means automatic."""

    max_concurrency: int = 8
    """Running requests."""
    max_pending_requests: int = 64
    """Waiting requests; one more is refused."""
    pending_timeout_s: float = 60.0
    """Longest wait before the first step, in seconds."""
    max_context: int | None = None
    """Tokens of prompt and output together; automatic is the model's, at most what fits."""
    prefill_chunk: int | None = None
    """Tokens of a prefill segment; automatic is 512 on the CPU and 2048 on CUDA."""
    default_max_tokens: int = 4096
    """Output tokens of a request that does not say; applied by the HTTP schema."""
    backend: Backend = "auto"
    """Kernels."""
    activations: Activations = "auto"
    """What NVFP4 layers multiply their weights with; automatic is fp4 where the GPU multiplies it and the checkpoint
    has scales for it, else bf16."""
    parse_special_tokens: bool = False
    """Whether control tokens that are spelled out in a message are real."""
    kv_pages: int | None = None
    """KV pages on the device; excludes `kv_cache_mib`."""
    kv_cache_mib: int | None = None
    """Bytes of KV pages on the device, in MiB; excludes `kv_pages`."""
    kv_cache_dtype: KvCacheDtype = "auto"
    """How keys and values are stored; automatic is the kernels' dtype."""
    page_size: int | None = None
    """Tokens of a KV page; automatic is 16 on the CPU and 64 on CUDA."""
    device_state_slots: int | None = None
    """State slots beyond those of the running requests: checkpoints that are kept while all of these run; automatic is
    16, and on CUDA as many more as go with its KV pages."""
    host_cache_mib: int | None = None
    """Host memory for KV pages and states together, in MiB; 0 keeps nothing there; automatic is at most a quarter of
    the RAM."""
    host_state_slots: int | None = None
    """Most state images in host memory; None for as many as its bytes hold."""
    self_heal: bool = True
    """Whether an audit gives back what nobody holds."""
    prefix_reuse: bool = True
    """Whether prompts are remembered between requests."""

    def __post_init__(self) -> None:
        least = {
            "max_concurrency": 1,
            "max_pending_requests": 0,
            "pending_timeout_s": 0,
            "max_context": 2,
            "prefill_chunk": 1,
            "default_max_tokens": 1,
            "kv_pages": 1,
            "kv_cache_mib": 1,
            "page_size": 1,
            "device_state_slots": 0,
            "host_cache_mib": 0,
            "host_state_slots": 1,
        }
        for name, minimum in least.items():
            value = getattr(self, name)
            if value is not None and value < minimum:
                raise ValueError(f"{name} must be at least {minimum}, not {value}")
        if self.kv_pages is not None and self.kv_cache_mib is not None:
            raise ValueError("kv_pages and kv_cache_mib say the same thing twice; set one of them")
