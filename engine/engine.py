"""The engine's front: load a model, submit requests, watch, drain and stop."""

from __future__ import annotations

from pathlib import Path

from engine.models.config import ModelConfig
from engine.options import EngineOptions
from engine.request import Delta, FinishReason, GenerationRequest, SamplingParams, Timings, Usage
from engine.snapshot import EngineSnapshot, EngineStatus
from engine.stream import Generation
from engine.text.chat_template import ChatTemplate
from engine.text.tokenizer import Tokenizer

__all__ = [
    "Delta",
    "Engine",
    "EngineOptions",
    "EngineSnapshot",
    "EngineStatus",
    "FinishReason",
    "Generation",
    "GenerationRequest",
    "SamplingParams",
    "Timings",
    "Usage",
]


class Engine:
    """One model, ready to answer. Every method but `load` belongs to one event loop's thread."""

    config: ModelConfig
    options: EngineOptions
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    """None where the checkpoint has none; chat requests then get an error."""
    max_context_tokens: int
    """Most tokens that prompt and output may have together."""
    model_folder: Path

    @classmethod
    def load(cls, folder: Path, options: EngineOptions | None = None) -> Engine:
        """Read a checkpoint in Hugging Face layout and allocate its memory. Blocking: call it in a thread.

        Raises ModelLoadError or InsufficientMemoryError.
        """
        raise NotImplementedError

    @property
    def status(self) -> EngineStatus:
        raise NotImplementedError

    async def start(self) -> None:
        """Start the loop's task. Call it once, in the event loop from which requests will be submitted."""
        raise NotImplementedError

    def submit(self, request: GenerationRequest) -> Generation:
        """Queue a request; iterate the result for its deltas.

        Raises ContextLengthExceededError, ServerOverloadedError or EngineUnavailableError at once; QueueTimeoutError
        and EngineUnavailableError can also come out of the iteration. `max_tokens` is clamped to what the context
        leaves.
        """
        raise NotImplementedError

    def heartbeat_age_seconds(self) -> float:
        """Seconds since the loop last turned; it turns at least once a second, unless one step takes longer."""
        raise NotImplementedError

    def snapshot(self) -> EngineSnapshot:
        raise NotImplementedError

    async def drain(self, timeout_s: float | None = None) -> bool:
        """Take no more requests and wait until the accepted ones are done; False when the time ran out first."""
        raise NotImplementedError

    async def stop(self) -> None:
        """Fail what still runs with EngineUnavailableError, end the loop and its thread. Safe to call twice."""
        raise NotImplementedError
