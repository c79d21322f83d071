"""The minutes that the whole check may take, so that it ends by itself."""

from __future__ import annotations

import time
from collections.abc import Callable


class Budget:
    """Counts from its making. Nothing is interrupted: a part asks before it starts."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = seconds
        self._clock = clock
        self._started = clock()

    @property
    def left_seconds(self) -> float:
        return self.seconds - (self._clock() - self._started)

    def extend(self, seconds: float) -> None:
        """Do not count these, which were spent on what is done once for a machine."""
        self._started += seconds

    @property
    def is_used(self) -> bool:
        return self.left_seconds <= 0

    @property
    def why(self) -> str:
        return (
            f"the budget of {self.seconds:.0f} s is used; run it again (what was compiled is kept), or give --budget-s"
        )
