"""From the fields of other servers to our own: the same under another name, refused by name, or without an effect."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from server.errors import ApiError
from server.schema.foreign import FLATTENED, HARMLESS, REFUSED, RENAMED, Refused

_PARENTS = frozenset(name.partition(".")[0] for name in REFUSED if "." in name)
_KNOWN = frozenset({*RENAMED, *(own for _, own in RENAMED.values()), *REFUSED, *HARMLESS})

logger = logging.getLogger("dalsegno.http")


def in_own_names(schema: type[BaseModel], body: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The body with the names of `schema`, and for each field that was sent under another name that name.

    Raises ApiError (400) for a field whose value would have an effect that is not built, and for two names of one
    thing that disagree. What nobody documents is left to the schema, which ignores it.
    """
    fields: dict[str, Any] = {}
    sent_as: dict[str, str] = {}
    for name, value, place in _flat(body, frozenset(FLATTENED)):
        own = name if name in schema.model_fields or name not in RENAMED else RENAMED[name][1]
        before = fields.get(own)
        if before is None:
            fields[own] = value
            if place != own and value is not None:
                sent_as[own] = place
        elif value is not None and not _is_same(value, before):
            other = sent_as.get(own, own)
            message = f"{place} and {other} are two names of one field here, and their values differ; send one"
            raise ApiError(400, message, param=place, code="invalid_value")
    _refuse_unsupported(schema, fields, sent_as)
    unknown = len(fields.keys() - schema.model_fields.keys() - _KNOWN)
    if unknown:
        logger.debug("fields that nobody documents are ignored: %d", unknown)
    return fields, sent_as


def _flat(body: Mapping[str, Any], objects: frozenset[str], inside: str = "") -> Iterator[tuple[str, Any, str]]:
    """Each field with its value and the place where it stands, those of `objects` as if they stood outside."""
    for name, value in body.items():
        place = inside + name
        if name not in objects or value is None:
            yield name, value, place
        elif isinstance(value, dict):
            yield from _flat(value, objects - {name}, f"{place}.")
        else:
            raise ApiError(400, f"{place}: Input should be an object", param=place, code="invalid_value")


def _refuse_unsupported(schema: type[BaseModel], fields: Mapping[str, Any], sent_as: Mapping[str, str]) -> None:
    for name, value in fields.items():
        found = {name: value}
        if name in _PARENTS and isinstance(value, dict):
            found |= {f"{name}.{inner}": each for inner, each in value.items()}
        for place, given in found.items():
            field = REFUSED.get(place)
            if field is None or _changes_nothing(field, given, fields):
                continue
            if place in schema.model_fields and not field.is_half_built:
                continue
            sent = sent_as.get(place, place)
            message = f"{sent} ({field.servers}) is not supported here; {field.hint}"
            raise ApiError(400, message, param=sent, code="unsupported_parameter")


def _changes_nothing(field: Refused, value: Any, fields: Mapping[str, Any]) -> bool:
    if field.beside and fields.get(field.beside) in (None, 1):
        return True
    if field.same_as and _is_same(value, fields.get(field.same_as) or 1):
        return True
    return any(_is_same(value, neutral) for neutral in field.neutral)


def _is_same(value: Any, other: Any) -> bool:
    """False and 0 are equal in Python but not in JSON; 0 and 0.0 are."""
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)
