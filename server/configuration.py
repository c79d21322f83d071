"""Where each setting comes from: flag, then environment variable, then file, then default."""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import SecretStr, ValidationError

from server.settings import ENV_PREFIX, NOT_BUILT_KEYS, Key, Settings, all_keys


class ConfigurationError(Exception):
    """A key, a value or the file is wrong (exit code 2); the message names the key, the value and its origin."""


@dataclass(frozen=True, slots=True)
class Resolved:
    """The settings, and for each dotted key the origin of its value (`default`, `flag --port`, ...)."""

    settings: Settings
    origins: Mapping[str, str]


def resolve(
    flags: Mapping[str, Any] | None = None,
    *,
    config_file: Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> Resolved:
    """Merge the sources. `flags` maps dotted keys to raw strings (or sequences of them). Raises ConfigurationError."""
    keys = {key.dotted: key for key in all_keys()}
    found: dict[str, tuple[Any, str]] = {}
    if config_file is not None:
        found |= _from_file(config_file, keys)
    found |= _from_environment(os.environ if environ is None else environ, keys)
    found |= {name: (raw, f"flag {keys[name].flag}") for name, raw in (flags or {}).items()}

    sections: dict[str, dict[str, Any]] = {}
    for name, (raw, origin) in found.items():
        key = keys[name]
        sections.setdefault(key.section, {})[key.name] = _parse(key, raw, origin)
    settings = Settings.model_validate(sections)
    origins = {name: found[name][1] if name in found else "default" for name in keys}
    _check_together(settings, origins)
    return Resolved(settings, origins)


def to_toml(settings: Settings, comments: Mapping[str, str]) -> str:
    """The settings as TOML with a comment above each key; keys of clients are hidden."""
    lines: list[str] = []
    section = ""
    for key in all_keys():
        if key.section != section:
            section = key.section
            lines += ["", f"[{section}]"] if lines else [f"[{section}]"]
        value = getattr(getattr(settings, key.section), key.name)
        lines += [f"# {comments[key.dotted]}", f"{key.name} = {_toml_value(value)}"]
    return "\n".join(lines) + "\n"


def example_toml() -> str:
    """The text of config.example.toml: every key with its default and one line of meaning."""
    head = (
        "# Every key with its default. Give a file like this one with --config FILE; a flag (--port) wins over an\n"
        "# environment variable (DALSEGNO_SERVER_PORT; lists are separated by commas), and that wins over the file.\n\n"
    )
    return head + to_toml(Settings(), {key.dotted: key.meaning for key in all_keys()})


def _from_file(path: Path, keys: Mapping[str, Key]) -> dict[str, tuple[Any, str]]:
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"--config {path}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"--config {path}: is not UTF-8 text (byte {error.start})") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"--config {path}: is not TOML: {error}") from error
    found: dict[str, tuple[Any, str]] = {}
    sections = {key.section for key in keys.values()}
    for section, table in document.items():
        if section not in sections:
            candidates = [*sections, *(key.name for key in keys.values())]
            raise ConfigurationError(f"{path}: unknown key {section!r}{_nearest(section, candidates, keys)}")
        if not isinstance(table, dict):
            raise ConfigurationError(f"{path}: {section} must be a table, written [{section}]")
        for name, value in table.items():
            dotted = f"{section}.{name}"
            if dotted in NOT_BUILT_KEYS:
                raise ConfigurationError(f"{path}: {dotted} is not built yet; take it out of the file")
            if dotted not in keys:
                raise ConfigurationError(f"{path}: unknown key {dotted!r}{_nearest(dotted, keys)}")
            found[dotted] = (value, f"file {path}")
    return found


def _from_environment(environ: Mapping[str, str], keys: Mapping[str, Key]) -> dict[str, tuple[Any, str]]:
    by_variable = {key.env: key for key in keys.values()}
    not_built = {f"{ENV_PREFIX}{name.replace('.', '_').upper()}" for name in NOT_BUILT_KEYS}
    found: dict[str, tuple[Any, str]] = {}
    for variable, value in environ.items():
        if not variable.startswith(ENV_PREFIX):
            continue
        if variable in not_built:
            raise ConfigurationError(f"environment: {variable} is not built yet; unset it")
        if variable not in by_variable:
            raise ConfigurationError(f"environment: unknown variable {variable!r}{_nearest(variable, by_variable)}")
        key = by_variable[variable]
        raw: Any = [part.strip() for part in value.split(",") if part.strip()] if key.is_list else value
        found[key.dotted] = (raw, f"env {variable}")
    return found


def _parse(key: Key, raw: Any, origin: str) -> Any:
    from_file = origin.startswith("file ")
    if key.is_secret and isinstance(raw, list | tuple) and all(isinstance(item, str) for item in raw):
        raw = [secret for item in raw for secret in _read_secrets(key, item, origin)]
    elif key.is_secret and not key.is_list and isinstance(raw, str):
        raw = _read_secret(key, raw, origin)
    try:
        if from_file and not key.is_secret:
            return key.adapter.validate_python(tuple(raw) if isinstance(raw, list) else raw, strict=True)
        return key.adapter.validate_python(raw)
    except ValidationError as error:
        shown = "a value" if key.is_secret else repr(raw)
        raise ConfigurationError(f"{key.dotted} is {shown} ({origin}); expected {key.expected}") from error


def _read_secrets(key: Key, item: str, origin: str) -> list[str]:
    if not item.startswith("@"):
        return [item]
    path = Path(item[1:])
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{key.dotted} ({origin}): the file {path} cannot be read: {error}") from error
    secrets = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not secrets:
        raise ConfigurationError(f"{key.dotted} ({origin}): the file {path} holds no key; expected one key per line")
    return secrets


def _read_secret(key: Key, item: str, origin: str) -> str:
    secrets = _read_secrets(key, item, origin)
    if len(secrets) > 1:
        raise ConfigurationError(f"{key.dotted} ({origin}): {item[1:]} holds {len(secrets)} keys; expected one")
    return secrets[0]


def _check_together(settings: Settings, origins: Mapping[str, str]) -> None:
    if settings.cache.kv_pages != "auto" and settings.cache.kv_cache_mib != "auto":
        raise ConfigurationError(
            f"cache.kv_pages ({origins['cache.kv_pages']}) and cache.kv_cache_mib ({origins['cache.kv_cache_mib']}) "
            "both size the same memory; give one of the two"
        )
    if settings.cache.cache_isolation == "key" and not settings.server.api_keys:
        raise ConfigurationError(
            f"cache.cache_isolation is key ({origins['cache.cache_isolation']}), but server.api_keys has none, so all "
            "clients would share; give keys, or leave the isolation shared"
        )
    if settings.server.admin_key in settings.server.api_keys:
        raise ConfigurationError(
            f"server.admin_key ({origins['server.admin_key']}) is one of server.api_keys; "
            "give operators a key of their own"
        )


def _nearest(name: str, candidates: Iterable[str], keys: Mapping[str, Key] | None = None) -> str:
    names = sorted(candidates)
    matches = difflib.get_close_matches(name, names, n=1, cutoff=0.0)
    if not matches:
        return ""
    nearest = matches[0]
    if keys is not None:
        nearest = next((dotted for dotted, key in keys.items() if key.name == nearest), f"[{nearest}]")
    return f"; the nearest is {nearest!r}"


def _toml_value(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(_toml_value(item) for item in value)}]"
    if isinstance(value, SecretStr):
        return '"***"' if value else '""'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    escaped = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
