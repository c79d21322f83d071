import pytest

from ops.health import HEARTBEAT_LIMIT_SECONDS, HealthStatus, Phase, judge_health


@pytest.mark.parametrize(
    ("phase", "age", "status"),
    [
        (Phase.STARTING, None, HealthStatus.STARTING),
        (Phase.SERVING, 0.1, HealthStatus.OK),
        (Phase.SERVING, HEARTBEAT_LIMIT_SECONDS, HealthStatus.OK),
        (Phase.SERVING, HEARTBEAT_LIMIT_SECONDS + 0.1, HealthStatus.UNAVAILABLE),
        (Phase.SERVING, None, HealthStatus.UNAVAILABLE),
        (Phase.DRAINING, 0.1, HealthStatus.DRAINING),
        (Phase.DRAINING, None, HealthStatus.DRAINING),
    ],
)
def test_health_follows_from_the_phase_and_the_heartbeat(phase, age, status):
    health = judge_health(phase, age)
    assert health.status is status
    assert health.is_ready is (status is HealthStatus.OK)
    assert bool(health.reasons) is not health.is_ready
