"""Which of the two formats a trace file has."""

from __future__ import annotations

from pathlib import Path

from bench.replay.conversations import read_conversations
from bench.replay.mooncake import MooncakeTrace
from bench.replay.requests import Trace, TraceError


def read_trace(path: Path, stretch: float = 1.0) -> Trace:
    """Raises TraceError for a file that is missing, empty or of neither format."""
    try:
        with path.open(encoding="utf-8") as lines:
            first = next((line for line in lines if line.strip()), None)
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"the trace {path} cannot be read: {error}; name a file of JSON lines") from None
    if first is None:
        raise TraceError(f"the trace {path} is empty; expected a JSON object a line, see docs/replay.md")
    trace: Trace = MooncakeTrace(path, stretch) if '"hash_ids"' in first else read_conversations(path, stretch)
    return trace
