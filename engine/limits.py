"""What the scheduler works within, and which requests lie outside it whatever else runs."""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import ContextLengthExceededError, RequestError
from engine.request import GenerationRequest


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """What the scheduler works within; tokens unless the name says otherwise."""

    max_concurrency: int
    max_pending_requests: int
    pending_timeout_seconds: float
    max_context_tokens: int
    prefill_chunk: int
    output_step_tokens: int = 64
    """Room for output that is reserved ahead, at admission and at each growth."""
    copy_bytes: int = 64 * 2**20
    """Most bytes to or from host memory in a step that computes something."""
    copy_bytes_alone: int = 512 * 2**20
    """The same where there is nothing to compute; a request that comes in then waits for so much."""
    copy_seconds: float = 0.02
    """About how long these copies may take, once it was seen how fast they are: memory that the host touches for the
    first time is slow."""
    copy_seconds_alone: float = 0.1

    def copy_budget(self, *, is_alone: bool) -> tuple[int, float]:
        """Most bytes and seconds of copies in a step, by whether there is nothing else to do in it."""
        if is_alone:
            return self.copy_bytes_alone, self.copy_seconds_alone
        return self.copy_bytes, self.copy_seconds


def refuse_unservable(request: GenerationRequest, limits: SchedulerLimits) -> None:
    """Raises ContextLengthExceededError, or RequestError for an empty prompt or no tokens to answer with."""
    prompt_tokens = len(request.prompt_token_ids)
    if prompt_tokens == 0:
        raise RequestError("the prompt has no tokens; send at least one", param="prompt")
    if request.sampling.max_tokens < 1:
        raise RequestError(f"max_tokens is {request.sampling.max_tokens}; ask for at least 1 token", param="max_tokens")
    refuse_overlong(prompt_tokens, limits.max_context_tokens)


def refuse_overlong(prompt_tokens: int, max_context_tokens: int) -> None:
    """Raises ContextLengthExceededError for a prompt that leaves no token for the answer."""
    if prompt_tokens >= max_context_tokens:
        raise ContextLengthExceededError(
            max_context_tokens,
            f"your prompt has {prompt_tokens} tokens, and at least 1 is for the answer, so it may have "
            f"{max_context_tokens - 1} tokens",
            param="prompt",
        )
