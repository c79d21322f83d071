"""The API as a page to read, out of the OpenAPI document: plain HTML without a script, so that nothing is loaded from
elsewhere and nothing runs where the dashboard keeps a key."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from jinja2 import Environment
from markupsafe import Markup, escape

Schema = Mapping[str, Any]

_LIMITS = {
    "minimum": "≥",
    "ge": "≥",
    "exclusiveMinimum": ">",
    "gt": ">",
    "maximum": "≤",
    "le": "≤",
    "exclusiveMaximum": "<",
    "lt": "<",
    "minLength": "characters ≥",
    "maxLength": "characters ≤",
    "minItems": "items ≥",
    "maxItems": "items ≤",
    "pattern": "matches",
}


@dataclass(frozen=True, slots=True)
class Row:
    """A line of a table: a parameter, a field of a body, or an answer."""

    name: str
    kind: Markup
    meaning: str
    is_required: bool = False


@dataclass(frozen=True, slots=True)
class Operation:
    """What one method does at one path."""

    method: str
    path: str
    meaning: str
    body: Markup
    parameters: tuple[Row, ...]
    answers: tuple[Row, ...]

    @property
    def anchor(self) -> str:
        return f"{self.method.lower()}{self.path}"


@dataclass(frozen=True, slots=True)
class Record:
    """A named schema with its fields."""

    name: str
    meaning: str
    fields: tuple[Row, ...]


def render_api_page(document: Schema) -> str:
    """The page of an OpenAPI 3.1 document; every text in it is escaped."""
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((files("server") / "api_page.html").read_text(encoding="utf-8"))
    groups: dict[str, list[Operation]] = {}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            group = operation.get("tags", ["other"])[0]
            groups.setdefault(group, []).append(_operation(method.upper(), path, operation))
    schemas = document.get("components", {}).get("schemas", {})
    records = [_record(name, schema) for name, schema in sorted(schemas.items())]
    return template.render(info=document["info"], groups=groups, records=records)


def _operation(method: str, path: str, operation: Schema) -> Operation:
    return Operation(
        method=method,
        path=path,
        meaning=operation.get("description", operation.get("summary", "")),
        body=_content(operation.get("requestBody", {})),
        parameters=tuple(
            _row(each["name"], {"description": each.get("description", ""), **each["schema"]}, each.get("required"))
            for each in operation.get("parameters", ())
        ),
        answers=tuple(
            Row(status, _content(answer), answer.get("description", ""))
            for status, answer in sorted(operation["responses"].items())
        ),
    )


def _record(name: str, schema: Schema) -> Record:
    required = schema.get("required", ())
    fields = schema.get("properties", {})
    rows = tuple(_row(field, each, field in required) for field, each in fields.items())
    return Record(name, schema.get("description", ""), rows or (_row("", schema, False),))


def _row(name: str, schema: Schema, is_required: bool | None) -> Row:
    meaning = schema.get("description", "")
    if schema.get("default") is not None:
        meaning += f"{'; ' if meaning else ''}default {schema['default']}"
    return Row(name, _kind(schema), meaning, bool(is_required))


def _content(part: Schema) -> Markup:
    """What a body or an answer holds, by its content type."""
    kinds = []
    for content_type, content in part.get("content", {}).items():
        schema = content.get("schema", {})
        kind = escape(schema["description"]) if set(schema) == {"description"} else _kind(schema)
        kinds.append(kind if content_type == "application/json" else Markup("{} ({})").format(kind, content_type))
    return Markup(", or ").join(kinds)


def _kind(schema: Schema) -> Markup:
    """A schema in a few words, with links to those that have a name."""
    return Markup(" or ").join(_kinds(schema)) or Markup("anything")


def _kinds(schema: Schema) -> Iterator[Markup]:
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        yield Markup('<a href="#{0}">{0}</a>').format(name)
    elif "enum" in schema or "const" in schema:
        yield escape(", ".join(repr(value) for value in schema.get("enum", [schema.get("const")])))
    elif "anyOf" in schema or "oneOf" in schema:
        for each in schema.get("anyOf", schema.get("oneOf", ())):
            if each.get("type") != "null":
                yield _kind(each)
    elif "type" in schema:
        yield _plain(schema)


def _plain(schema: Schema) -> Markup:
    kind = " or ".join([schema["type"]] if isinstance(schema["type"], str) else schema["type"])
    if kind == "array":
        text = Markup("list of {}").format(_kind(schema.get("items", {})))
    elif isinstance(schema.get("additionalProperties"), Mapping):
        text = Markup("object of {}").format(_kind(schema["additionalProperties"]))
    else:
        text = escape(kind)
    limits = ", ".join(_limits(schema))
    return Markup("{} ({})").format(text, limits) if limits else text


def _limits(schema: Schema) -> Iterable[str]:
    return (f"{words} {schema[name]}" for name, words in _LIMITS.items() if name in schema)
