"""Sets up logging once per process: every logger's lines, ours and the libraries', for people or as JSON lines."""

from __future__ import annotations

import contextlib
import logging
import sys
from typing import Any, Literal, TextIO

import structlog

from ops.console import RECORD_KEY
from ops.event_json import as_json

LogFormat = Literal["auto", "console", "json"]


def configure_logging(level: str, log_format: LogFormat = "auto", stream: TextIO | None = None) -> None:
    """Send the records of every stdlib and structlog logger to `stream` (standard error), one line each.

    `auto` writes for people when the stream is a terminal and JSON otherwise. Tracebacks are written only at `debug`:
    a library's exception text may hold what a client sent.
    """
    stream = sys.stderr if stream is None else stream
    is_console = log_format == "console" or (log_format == "auto" and stream.isatty())
    shared: list[structlog.typing.Processor] = [
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    renderer: structlog.typing.Processor
    if is_console:
        # Not the formatter that it takes by itself, which shows local variables: prompts and keys are among them.
        plain = structlog.dev.plain_traceback
        renderer = structlog.dev.ConsoleRenderer(colors=stream.isatty(), exception_formatter=plain)
    else:
        renderer = structlog.processors.JSONRenderer()
    steps: list[structlog.typing.Processor] = [
        structlog.stdlib.ProcessorFormatter.remove_processors_meta,
        _leave_sentence if is_console else _write_event,
    ]
    if level != "debug":
        steps.append(_name_exception_only)
    elif not is_console:
        steps.append(structlog.processors.format_exc_info)
    formatter = structlog.stdlib.ProcessorFormatter(foreign_pre_chain=shared, processors=[*steps, renderer])
    handler = _Lines(stream)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    for name in ("dalsegno", "uvicorn"):
        logging.getLogger(name).setLevel(level.upper())
    if level != "debug":
        logging.getLogger("uvicorn").setLevel(logging.WARNING)
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )


class _Lines(logging.StreamHandler[TextIO]):
    """Writes lines as long as somebody reads them; afterwards they are lost, and standard output is told once.

    Mutable: only under the handler's own lock.
    """

    _is_told = False

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exception()
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._is_told:
            self._is_told = True
            with contextlib.suppress(OSError):
                print(f"the log cannot be written ({error.strerror}); the process goes on without", flush=True)


def _leave_sentence(_logger: Any, _method: str, line: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """For people, the line of an event is its sentence."""
    line.pop(RECORD_KEY, None)
    return line


def _write_event(_logger: Any, _method: str, line: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """As JSON, the line of an event is the event, beside what every line has."""
    record = line.pop(RECORD_KEY, None)
    return line if record is None else {**as_json(record), **line, "event": record.event.KIND.value}


def _name_exception_only(_logger: Any, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Replace a traceback by the type of the exception and the place where it was raised."""
    info = event.pop("exc_info", None)
    if not info:
        return event
    error = sys.exc_info() if info is True else info
    if isinstance(error, BaseException):
        error = (type(error), error, error.__traceback__)
    kind, _, trace = error
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    event["exception"] = kind.__name__ if kind is not None else "none"
    if trace is not None:
        event["raised_at"] = f"{trace.tb_frame.f_code.co_filename.rsplit('/', 1)[-1]}:{trace.tb_lineno}"
    return event
