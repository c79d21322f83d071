"""The engine's errors. Each message names what was given, what was expected, and what to do."""

from __future__ import annotations


class EngineError(Exception):
    """Base of everything the engine raises on purpose."""


class ModelLoadError(EngineError):
    """The model cannot be loaded (exit code 3)."""


class SourceUnreachableError(ModelLoadError):
    """The registry or hub that holds the model cannot be reached, and there is no copy on this machine."""


class UnsupportedConfigError(ModelLoadError):
    """A field of `config.json` has a value that no architecture here supports."""

    def __init__(self, field: str, value: object, expected: str) -> None:
        super().__init__(f"config.json: {field} is {value!r}, which is not supported; expected {expected}")
        self.field = field


class WeightsError(ModelLoadError):
    """A tensor is missing, left over, of a wrong shape or format, or a file is broken; the message names it."""


class UnusableOptionError(EngineError):
    """An option that this model cannot be run with (exit code 2)."""


class BackendUnavailableError(EngineError):
    """The kernels asked for cannot run here; the message says what is missing."""

    def __init__(self, backend: str, missing: str) -> None:
        super().__init__(f"backend {backend!r} is not available: {missing}; use `auto` or `torch`")
        self.backend = backend


class NonFiniteLogitsError(EngineError):
    """The model's output is not a number, or infinite, for some rows of a step; no token can be picked for them."""

    def __init__(self, rows: list[int]) -> None:
        super().__init__(
            f"the logits of rows {rows} are not finite; expected at least one finite logit and no NaN in a row: "
            "check the weights, or the state that these rows were resumed from"
        )
        self.rows = rows


class FireDrillError(EngineError):
    """What a fault that an operator switched on raises, where the real one would come from."""

    def __init__(self, fault: str) -> None:
        super().__init__(f"the fire drill {fault} is on")


class ChatTemplateError(EngineError):
    """The chat template is broken or refuses these messages."""


class InsufficientMemoryError(EngineError):
    """A buffer does not fit (exit code 5). `largest`: the most that the flag may say here, where that is known."""

    def __init__(
        self, flag: str, needed_bytes: int, available_bytes: int, purpose: str, largest: int | None = None
    ) -> None:
        advice = f"lower {flag}" if largest is None or largest < 1 else f"lower {flag} to {largest} or less"
        super().__init__(f"{purpose} needs {needed_bytes:,} bytes but {available_bytes:,} are available; {advice}")
        self.flag = flag
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes


class RequestError(EngineError):
    """A request cannot be served as it stands. `param` names the field, `code` is the API error code."""

    code: str | None = None

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextLengthExceededError(RequestError):
    """The prompt, or the prompt and the output asked for, can never fit. `however` goes on after the sentence by which
    clients know an overflow, so that they shorten the history rather than give up."""

    code = "context_length_exceeded"

    def __init__(self, max_context_tokens: int, however: str, param: str | None = None) -> None:
        super().__init__(
            f"This model's maximum context length is {max_context_tokens} tokens. However, {however}. "
            "Please reduce the length of the messages or of the prompt.",
            param,
        )


class ServerOverloadedError(RequestError):
    """The queue is full; try again later."""

    code = "server_overloaded"


class QueueTimeoutError(RequestError):
    """The request waited longer than the wait limit."""

    code = "queue_timeout"


class EngineUnavailableError(RequestError):
    """The engine is stopping, or a step failed; the message names the type of the first cause."""

    code = "engine_unavailable"
