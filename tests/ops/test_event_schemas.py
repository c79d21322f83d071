"""Every event is what `docs/events/` says it is."""

import copy
import json
import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import get_args, get_origin, get_type_hints

import jsonschema_rs
import pytest

from cache import ROOT_PATH, CheckpointKind, LossReason, SkipReason, Tier
from engine.request import FinishReason
from ops.event_json import SCHEMA_VERSION, as_json
from ops.events import EVENT_TYPES, Event, EventKind
from ops.insights.types import InsightId, Severity
from tests.ops.event_samples import MARKER, SAMPLES, record

FOLDER = Path(__file__).parents[2] / "docs/events"
SCHEMAS = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.json"))}
COMMON = ["event", "schema_version", "timestamp_unix_ms", "server_instance_id"]
PATHS = {ROOT_PATH, *CheckpointKind}

KIND_IDS = [kind.KIND for kind in EVENT_TYPES]


def resolved(schema, root):
    return root["$defs"][schema["$ref"].rsplit("/", 1)[-1]] if "$ref" in schema else schema


def closed(schema):
    """The schema, with nothing allowed that it does not name."""
    schema = copy.deepcopy(schema)
    pending = [schema]
    while pending:
        part = pending.pop()
        if isinstance(part, dict):
            if "properties" in part and "const" not in part:
                part["additionalProperties"] = False
            pending.extend(part.values())
    return schema


def is_optional(hint):
    return get_origin(hint) in (types.UnionType,) and type(None) in get_args(hint)


def dataclass_within(hint):
    return next((each for each in (hint, *get_args(hint)) if is_dataclass(each)), None)


def hold_equal(kind, schema, root, where, common=()):
    """The properties of an object are the fields of a dataclass, and so are those of the objects in it."""
    hints = {field.name: get_type_hints(kind)[field.name] for field in fields(kind)}
    assert list(schema["properties"]) == [*common, *hints], where
    assert schema["required"] == [*common, *(name for name, hint in hints.items() if not is_optional(hint))], where
    for name, hint in hints.items():
        part, place = resolved(schema["properties"][name], root), f"{where}.{name}"
        inner = dataclass_within(hint)
        if inner is not None:
            hold_equal(inner, part, root, place)
        elif any(get_origin(each) is Mapping for each in (hint, *get_args(hint))):
            assert part["type"] == "object", place
        else:
            plain = next(each for each in (*get_args(hint), hint) if each is not type(None))
            json_type = {int: "integer", float: "number", bool: "boolean"}.get(plain, "string")
            assert part["type"] == json_type, place


def at(kind, *path):
    """A part of a schema, by the names that lead to it."""
    root = part = SCHEMAS[kind]
    for name in path:
        part = resolved(part["properties"][name], root)
    return part


def test_there_is_a_schema_for_each_kind_and_none_besides():
    assert set(SCHEMAS) == set(EventKind) == set(KIND_IDS)
    assert set(get_args(Event)) == set(EVENT_TYPES)


@pytest.mark.parametrize("kind", EVENT_TYPES, ids=KIND_IDS)
def test_a_schema_has_the_fields_of_its_event_in_their_order(kind):
    schema = SCHEMAS[kind.KIND]
    hold_equal(kind, schema, schema, kind.KIND, COMMON)
    assert schema["properties"]["event"] == {"const": kind.KIND}
    assert schema["properties"]["schema_version"] == {"const": SCHEMA_VERSION}


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_schema_is_one_itself(name):
    jsonschema_rs.meta.validate(SCHEMAS[name])


@pytest.mark.parametrize("event", SAMPLES, ids=lambda event: event.KIND)
def test_every_event_that_the_code_makes_is_as_its_schema_says(event):
    jsonschema_rs.Draft202012Validator(closed(SCHEMAS[event.KIND])).validate(as_json(record(event)))


@pytest.mark.parametrize("kind", EVENT_TYPES, ids=KIND_IDS)
def test_every_kind_is_among_what_is_held_to_the_schemas_and_a_field_too_few_or_too_many_fails(kind):
    event = next(event for event in SAMPLES if isinstance(event, kind))
    validator = jsonschema_rs.Draft202012Validator(closed(SCHEMAS[kind.KIND]))
    whole = as_json(record(event))
    assert not validator.is_valid(whole | {"unknown": 1})
    for name in SCHEMAS[kind.KIND]["required"]:
        assert not validator.is_valid({key: value for key, value in whole.items() if key != name}), name


def test_what_all_events_have_in_common_comes_first():
    for event in SAMPLES:
        assert list(as_json(record(event)))[:4] == COMMON


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (at("request_done", "result", "finish_reason")["enum"], set(FinishReason)),
        (at("request_done", "result", "reuse")["enum"], PATHS),
        (at("request_done", "result", "source")["propertyNames"]["enum"], set(Tier)),
        (at("request_done", "result", "lost")["propertyNames"]["enum"], set(LossReason)),
        (at("throughput", "context_cache", "selections")["required"], PATHS),
        (at("throughput", "context_cache", "lost_tokens")["required"], set(LossReason)),
        (at("throughput", "context_cache", "pressure", "evictions")["required"], set(CheckpointKind)),
        (at("throughput", "context_cache", "pressure", "publish_skipped")["required"], set(SkipReason)),
        (at("insight_opened", "insight", "id")["enum"], set(InsightId)),
        (at("insight_opened", "insight", "severity")["enum"], set(Severity)),
    ],
)
def test_the_words_of_the_schemas_are_those_of_the_code(found, expected):
    assert set(found) == expected


def test_the_same_part_is_the_same_in_every_schema():
    for part in ("result", "timings_seconds"):
        assert at("request_done", part) == at("request_error", part)
    assert at("insight_opened", "insight")["properties"] == at("insight_cleared", "insight")["properties"]


def test_what_was_not_measured_is_absent():
    [queued] = [event for event in SAMPLES if event.KIND == "request_error" and event.result.reuse is None]
    told = as_json(record(queued))
    assert told["timings_seconds"] == {"queue": 60.0, "total": 60.0}
    assert told["result"] == {"finish_reason": "error", "prompt_tokens": 3903, "completion_tokens": 0}


def test_nothing_that_a_client_may_have_written_is_in_an_event():
    assert MARKER not in json.dumps([as_json(record(event)) for event in SAMPLES])


def test_the_readme_names_every_kind():
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert [kind for kind in EventKind if f"[`{kind}`]({kind}.json)" not in text] == []
