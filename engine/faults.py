"""The faults of a fire drill, by name: an operator sees that detection fires, a test proves it."""

from __future__ import annotations

from enum import StrEnum


class Fault(StrEnum):
    """Each is switched on and off while the engine runs."""

    LEAK_HOST_STATE = "leak_host_state"
    """State images in host memory are not given back."""
    REFUSE_PUBLISH = "refuse_publish"
    """No checkpoint becomes visible."""
    DROP_STATE = "drop_state"
    """Checkpoints lose their state image right after they were published."""
    RESTORE_FAIL = "restore_fail"
    """No copy from host memory arrives."""
    STEP_FAIL = "step_fail"
    """Each step raises."""
    SLOW_STEP = "slow_step"
    """Each step takes longer."""
