"""The names of models that a shell completes: told without loading anything that could read one."""

from __future__ import annotations

from engine import model_store
from engine.errors import EngineError
from engine.short_names import all_short_names


def complete_model(incomplete: str) -> list[str]:
    """What `serve` takes, but for folders, which the shell knows, and hub ids."""
    return [name for name in sorted({*all_short_names(), *_made()}) if name.startswith(incomplete)]


def complete_removable(incomplete: str) -> list[str]:
    """What `rm` takes."""
    return [name for name in _made() if name.startswith(incomplete)]


def _made() -> tuple[str, ...]:
    try:
        return model_store.names()
    except EngineError:
        return ()
