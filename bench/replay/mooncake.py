"""Reads traces of the Mooncake release (Qin et al., FAST 2025): prompts as hashes of blocks of 512 tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

from bench.replay.requests import SimRequest, TraceError

BLOCK_TOKENS = 512
_FIELDS: tuple[tuple[str, type], ...] = (
    ("timestamp", int),
    ("input_length", int),
    ("output_length", int),
    ("hash_ids", list),
)


class MooncakeTrace:
    """A symbol is a block: its id stands for 512 tokens and all before them, so it is exact to share by ids."""

    tokens_per_symbol = BLOCK_TOKENS

    def __init__(self, path: Path, stretch: float = 1.0) -> None:
        """`stretch` multiplies the time between requests. Raises TraceError, also for lines out of order."""
        self.name = path.name
        self._requests = list(_read(path, stretch))

    def __len__(self) -> int:
        return len(self._requests)

    def requests(self) -> Iterator[SimRequest]:
        return iter(self._requests)


def _read(path: Path, stretch: float) -> Iterator[SimRequest]:
    last_ms = 0
    numbers = count()
    with path.open(encoding="utf-8") as lines:
        for line_number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"{path}, line {line_number}"
            record = _record(line, where)
            if record["timestamp"] < last_ms:
                found = f"{record['timestamp']} after {last_ms}"
                raise TraceError(f"{where}: field 'timestamp' goes back, {found}; sort the lines by timestamp")
            last_ms = record["timestamp"]
            number = next(numbers)
            yield SimRequest(
                number=number,
                arrival_seconds=stretch * last_ms / 1000,
                thread=str(number),
                namespace="",
                prompt=tuple(record["hash_ids"]),
                prompt_tokens=record["input_length"],
                answer=(),
                output_tokens=record["output_length"],
                frontiers=(),
            )


def _record(line: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise TraceError(f"{where}: not JSON ({error.msg} at column {error.colno}); repair or drop the line") from None
    if not isinstance(record, dict):
        raise TraceError(f"{where}: found {type(record).__name__}, expected a JSON object; repair or drop the line")
    for name, kind in _FIELDS:
        found = record.get(name)
        least = 1 if name != "timestamp" else 0
        is_right = isinstance(found, kind) and not isinstance(found, bool)
        if not is_right or (isinstance(found, int) and found < least):
            expected = "a list of block ids" if kind is list else f"a whole number of at least {least}"
            raise TraceError(f"{where}: field {name!r} is {found!r}, expected {expected}; repair or drop the line")
    ids, blocks = record["hash_ids"], -(-record["input_length"] // BLOCK_TOKENS)
    if not all(type(each) is int for each in ids):
        raise TraceError(f"{where}: field 'hash_ids' has {ids!r:.80}, expected whole numbers; repair or drop the line")
    if len(ids) != blocks:
        raise TraceError(
            f"{where}: field 'hash_ids' has {len(ids)} ids but {record['input_length']} tokens make {blocks} blocks of "
            f"{BLOCK_TOKENS}; is it a trace with another block size?"
        )
    return record
