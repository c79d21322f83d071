"""What the shell sees: one number for each family of failures."""

from __future__ import annotations

from enum import IntEnum

from engine.errors import (
    BackendUnavailableError,
    ChatTemplateError,
    InsufficientMemoryError,
    ModelLoadError,
    UnusableOptionError,
)
from ops.event_log import EventLogError
from server.configuration import ConfigurationError
from server.listener import PortTakenError


class ExitCode(IntEnum):
    """The codes of `dalsegno`. FAILED is any failure that has no code of its own."""

    OK = 0
    FAILED = 1
    USAGE = 2
    MODEL = 3
    PORT = 4
    MEMORY = 5
    INTERRUPTED = 130


def exit_code_of(error: Exception) -> ExitCode:
    """The code of a failure."""
    match error:
        case ConfigurationError() | BackendUnavailableError() | UnusableOptionError() | EventLogError():
            return ExitCode.USAGE
        case ModelLoadError() | ChatTemplateError():
            return ExitCode.MODEL
        case PortTakenError():
            return ExitCode.PORT
        case InsufficientMemoryError():
            return ExitCode.MEMORY
        case _:
            return ExitCode.FAILED
