"""Reads the memory plan that `dalsegno inspect` prints."""

from __future__ import annotations

import re

_LINE = re.compile(r"(?P<name>(  )?[A-Za-z][\w ]*?) {2,}(?P<bytes>[\d,]+) {2,}[\d,.]+ (B|KiB|MiB|GiB)\b")


def printed_bytes(output: str) -> dict[str, int]:
    """Bytes by the name of the line; names of what is within another keep their two leading spaces."""
    lines = (_LINE.match(line) for line in output.splitlines())
    return {line["name"]: int(line["bytes"].replace(",", "")) for line in lines if line}
