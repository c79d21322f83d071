"""docs/compatibility.md says what the code does."""

import re
from pathlib import Path

from server.commands.foreign_flags import HINTS
from server.schema.foreign import HARMLESS, REFUSED, RENAMED
from server.settings import all_keys

PAGE = (Path(__file__).parents[2] / "docs" / "compatibility.md").read_text(encoding="utf-8")


def table(after):
    """The rows of the first table after a text, as cells."""
    lines = PAGE[PAGE.index(after) :].splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("|---"))
    rows = []
    for line in lines[first + 1 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split(" | ")])
    return rows


def by_server(table_):
    servers = {server for names in table_.values() for server in names.split(", ")}
    return {server: {name for name, names in table_.items() if server in names.split(", ")} for server in servers}


def test_every_renamed_field_is_told():
    told = {there.strip("`"): (whose, here.strip("`")) for there, whose, here in table("have another name here")}
    assert told == RENAMED


def test_every_refused_and_every_harmless_field_is_told():
    for after, documented in (
        ("These are refused", {name: field.servers for name, field in REFUSED.items()}),
        ("These change nothing here", HARMLESS),
    ):
        assert {whose: set(re.findall(r"`([^`]+)`", names)) for whose, names in table(after)} == by_server(documented)


def test_every_flag_is_told():
    aliases = {(alias, key.flag) for key in all_keys() for alias in key.aliases}
    assert {(there.strip("`"), here.strip("`")) for there, _, here in table("These mean the same")} == aliases
    told = {there.strip("`"): (whose, hint) for there, whose, hint in table("there is something else")}
    assert told == HINTS
