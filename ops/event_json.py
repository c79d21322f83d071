"""An event, or any record, as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import StrEnum
from functools import cache
from typing import Any

from ops.events import Record

SCHEMA_VERSION = 2
"""Goes up when a field changes its meaning or leaves; new fields may come at any time."""

_DECIMALS = 6
"""Of numbers that are not whole: microseconds are below what any of them tells."""


def as_json(record: Record) -> dict[str, Any]:
    """The JSON object of an event: what all have in common first."""
    return {
        "event": record.event.KIND.value,
        "schema_version": SCHEMA_VERSION,
        "timestamp_unix_ms": record.stamp.timestamp_unix_ms,
        "server_instance_id": record.stamp.server_instance_id,
        **plain(record.event),
    }


def plain(value: Any) -> Any:
    """A dataclass and all that is in it as dictionaries, lists, strings and numbers; fields that are None are left
    out."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return round(value, _DECIMALS)
    if isinstance(value, StrEnum):
        return value.value
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return {str(name): plain(each) for name, each in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        found = ((name, getattr(value, name)) for name in _field_names(type(value)))
        return {name: plain(each) for name, each in found if each is not None}
    return [plain(each) for each in value]


@cache
def _field_names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))
