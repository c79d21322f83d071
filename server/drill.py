"""A fire drill: faults that an operator switches on to see that they are detected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cache import Fault
from server.configuration import ConfigurationError


@dataclass(frozen=True, slots=True)
class FireDrill:
    """Whether faults may be switched on, and which are from the start."""

    is_allowed: bool = False
    faults: frozenset[Fault] = frozenset()


NO_DRILL = FireDrill()


def plan_drill(is_allowed: bool, names: Sequence[str]) -> FireDrill:
    """From `--allow-faults` and `--fault`. Raises ConfigurationError."""
    if names and not is_allowed:
        raise ConfigurationError("--fault needs --allow-faults: it makes the daemon fail on purpose")
    unknown = [name for name in names if name not in set(Fault)]
    if unknown:
        raise ConfigurationError(f"--fault is {unknown[0]!r}; expected one of {', '.join(Fault)}")
    return FireDrill(is_allowed, frozenset(map(Fault, names)))
