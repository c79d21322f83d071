"""Gives a command its flags from the schema of the settings, so that each key is written down once."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_type_hints

import typer

from ops.log import configure_logging
from server.commands.model_names import complete_model
from server.configuration import ConfigurationError, Resolved, resolve
from server.settings import Key, all_keys

Result = TypeVar("Result")

MODEL_KEY = "server.model"
API_KEYS_KEY = "server.api_keys"


def with_settings(
    *sections: str, model: Literal["argument", "option", "none"] = "none", asks_daemon: bool = False
) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Decorate a command whose first parameter is `resolved: Resolved`.

    It gets a flag for each key of `sections` and of `ops`, `--config`, and the model as MODEL or --model. With
    `asks_daemon`, for a command that has a --url, also --api-key. The settings are resolved and logging is set up
    before the command runs.
    """
    keys = [key for key in all_keys() if key.section in {*sections, "ops"} and key.dotted != MODEL_KEY]
    model_keys = [key for key in all_keys() if key.dotted == MODEL_KEY and model != "none"]

    def decorate(command: Callable[..., Result]) -> Callable[..., Result]:
        hints = get_type_hints(command, include_extras=True)
        own = list(inspect.signature(command).parameters.values())[1:]
        own = [parameter.replace(annotation=hints[parameter.name]) for parameter in own]

        @functools.wraps(command)
        def run(**values: Any) -> Result:
            config, api_key = values.pop("config"), values.pop("api_key", None)
            flags = {key.dotted: _given(key, values) for key in [*model_keys, *keys]}
            if api_key is not None:
                flags[API_KEYS_KEY] = [api_key]
            given = {name: value for name, value in flags.items() if value is not None}
            resolved = resolve(given, config_file=config)
            configure_logging(resolved.settings.ops.log_level, resolved.settings.ops.log_format)
            return command(resolved, **values)

        generated = [_api_key_option()] if asks_daemon else []
        generated += [_config_option(), *map(_option, keys), *(_alias_option(key) for key in keys if key.aliases)]
        generated += [_argument(key) for key in model_keys if model == "argument"]
        generated += [_model_option(key, is_listed=model == "option") for key in model_keys]
        parameters = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in [*own, *generated]]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate


def _given(key: Key, values: dict[str, Any]) -> Any:
    """What was given for a key, by its own flag or by another server's name for it; None for nothing."""
    found = [values.pop(name, None) for name in (_parameter_name(key), _alias_name(key))]
    given = [value for value in found if value not in (None, [], ())]
    if not given:
        return None
    if key.is_list:
        return [item for value in given for item in value]
    if key.is_switch:
        return str(not key.default).lower()
    if len(given) > 1:
        raise ConfigurationError(f"{key.flag} was given twice, once by another of its names; give it once")
    return given[0]


def _parameter_name(key: Key) -> str:
    return f"{key.section}_{key.name}"


def _alias_name(key: Key) -> str:
    return f"{_parameter_name(key)}_by_another_name"


def _option(key: Key) -> inspect.Parameter:
    default = "none" if key.is_list or key.is_secret else str(key.default)
    option = typer.Option(
        key.flag,
        help=f"{key.meaning} [{key.dotted}, default {default}]".replace("[", "\\["),
        show_default=False,
        metavar=None if key.is_switch else _metavar(key),
        autocompletion=_completer(key),
        rich_help_panel=f"{key.section} settings",
    )
    return _parameter(_parameter_name(key), Annotated[_kind(key), option])


def _alias_option(key: Key) -> inspect.Parameter:
    """What other servers call it: understood, but not listed by --help (docs/compatibility.md does)."""
    return _parameter(_alias_name(key), Annotated[_kind(key), typer.Option(*key.aliases, hidden=True)])


def _kind(key: Key) -> Any:
    return list[str] | None if key.is_list else bool | None if key.is_switch else str | None


def _argument(key: Key) -> inspect.Parameter:
    argument = typer.Argument(
        help=key.meaning, show_default=f"{key.default}", metavar="[MODEL]", autocompletion=complete_model
    )
    return _parameter(_parameter_name(key), Annotated[str | None, argument])


def _model_option(key: Key, *, is_listed: bool) -> inspect.Parameter:
    option = typer.Option(
        *key.aliases,
        help=key.meaning,
        show_default=f"{key.default}",
        metavar="MODEL",
        hidden=not is_listed,
        autocompletion=complete_model,
    )
    return _parameter(_alias_name(key), Annotated[str | None, option])


def api_key_for(resolved: Resolved, url: str | None) -> str | None:
    """The first of the configured keys, for the daemon at `url`. Raises ConfigurationError for a key that no daemon is
    there for."""
    keys = resolved.settings.server.api_keys
    if url is None and resolved.origins[API_KEYS_KEY].startswith("flag "):
        raise ConfigurationError("--api-key was given without --url; a model in this process asks for no key")
    return keys[0].get_secret_value() if keys else None


def _api_key_option() -> inspect.Parameter:
    help_text = f"key for the daemon at --url; @FILE reads it \\[{API_KEYS_KEY}]"
    return _parameter("api_key", Annotated[str | None, typer.Option("--api-key", help=help_text, metavar="KEY")])


def _config_option() -> inspect.Parameter:
    option = typer.Option("--config", help="TOML file with settings, see config.example.toml", metavar="FILE")
    return _parameter("config", Annotated[Path | None, option])


def _parameter(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _completer(key: Key) -> Callable[[str], list[str]] | None:
    """Completes the words that a setting takes; None where a shell does better."""
    words = _words(key)
    return (lambda incomplete: [word for word in words if word.startswith(incomplete)]) if words else None


def _words(key: Key) -> tuple[str, ...]:
    """All values of a setting that takes certain words only."""
    choices = get_args(key.field.annotation)
    return choices if all(isinstance(choice, str) for choice in choices) else ()


def _metavar(key: Key) -> str:
    if words := _words(key):
        return "|".join(words)
    if key.is_secret:
        return "KEY"
    if key.expected.startswith("a file,"):
        return "FILE"
    if isinstance(key.default, str) and key.default != "auto":
        return key.name.upper()
    return "SECONDS" if key.name.endswith("_s") else "NAME" if key.name.endswith(("name", "names")) else "N"
