"""Faults by name, for fire drills and tests: each is wired where the real one would happen."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum


class Fault(StrEnum):
    """What can be made to go wrong (interface: `--fault`)."""

    LEAK_HOST_STATE = "leak_host_state"
    """A state image leaves host memory, and its units do not come back."""
    REFUSE_PUBLISH = "refuse_publish"
    """No frontier becomes a checkpoint."""
    DROP_STATE = "drop_state"
    """A checkpoint's state is gone as soon as it is published."""
    RESTORE_FAIL = "restore_fail"
    """A copy from host memory fails."""
    STEP_FAIL = "step_fail"
    """A step of the model fails."""
    SLOW_STEP = "slow_step"
    """Each step takes a fifth of a second longer."""


class Faults:
    """Those that are on. Mutable: only the engine loop's task may switch them; other threads may ask."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._on: frozenset[Fault] = frozenset()
        self.switch(names)

    @property
    def on(self) -> frozenset[Fault]:
        return self._on

    def switch(self, names: Iterable[str]) -> None:
        """Turn exactly these on. Raises ValueError for a name that is none."""
        self._on = frozenset(Fault(name) for name in names)

    def __contains__(self, fault: Fault) -> bool:
        return fault in self._on
