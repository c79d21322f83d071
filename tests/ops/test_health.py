"""Health follows from the phase, the heartbeat and what the insights say."""

import pytest

from cache import Fault
from ops.health import HEARTBEAT_LIMIT_SECONDS, HealthStatus, Phase, judge_health
from ops.insights.types import Insight, InsightId, ReuseState, Severity


def insight(insight_id, severity):
    return Insight(insight_id, severity, "a title", "a statement", {}, {}, 0, "do this")


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
        (Phase.ENDING, 0.1, HealthStatus.DRAINING),
    ],
)
def test_health_follows_from_the_phase_and_the_heartbeat(phase, age, status):
    health = judge_health(phase, age, ReuseState.HEALTHY, ())
    assert health.status is status
    assert health.is_ready is (status is HealthStatus.OK)
    assert bool(health.reasons) is not health.is_ready


def test_a_fire_drill_is_named_and_changes_nothing_else():
    health = judge_health(Phase.SERVING, 0.1, ReuseState.HEALTHY, (), {Fault.STEP_FAIL, Fault.DROP_STATE})
    assert health.faults == (Fault.DROP_STATE, Fault.STEP_FAIL)
    assert (health.status, health.reasons) == (HealthStatus.OK, ())


@pytest.mark.parametrize(
    ("reuse", "is_degraded"),
    [
        (ReuseState.HEALTHY, False),
        (ReuseState.DEGRADED, True),
        (ReuseState.COLLAPSED, True),
        (ReuseState.RECOVERING, False),
    ],
)
def test_poor_reuse_degrades_health_and_a_restart_is_not_asked_for(reuse, is_degraded):
    health = judge_health(Phase.SERVING, 0.1, reuse, ())
    assert health.status is (HealthStatus.DEGRADED if is_degraded else HealthStatus.OK)
    assert health.is_ready, "a restart storm helps nobody"
    assert health.reuses is not is_degraded
    assert bool(health.reasons) is is_degraded
    assert health.reuse is reuse


@pytest.mark.parametrize(
    ("insight_id", "severity", "is_degraded"),
    [
        (InsightId.LEDGER_VIOLATION, Severity.CRITICAL, True),
        (InsightId.ENGINE_FAULTS, Severity.CRITICAL, True),
        (InsightId.CAPACITY_SMALL, Severity.NOTICE, False),
        (InsightId.QUEUE_SATURATED, Severity.WARNING, False),
    ],
)
def test_what_is_critical_degrades_health_and_what_is_worth_knowing_does_not(insight_id, severity, is_degraded):
    health = judge_health(Phase.SERVING, 0.1, ReuseState.HEALTHY, [insight(insight_id, severity)])
    assert health.status is (HealthStatus.DEGRADED if is_degraded else HealthStatus.OK)
    assert health.reasons == ((f"{insight_id}: a title",) if is_degraded else ())


def test_a_daemon_that_does_not_serve_says_so_whatever_reuse_does():
    health = judge_health(Phase.DRAINING, 0.1, ReuseState.COLLAPSED, [])
    assert (health.status, health.reuse) == (HealthStatus.DRAINING, ReuseState.COLLAPSED)


@pytest.mark.parametrize(
    ("failed_steps", "status"), [(0, HealthStatus.OK), (2, HealthStatus.OK), (3, HealthStatus.UNAVAILABLE)]
)
def test_three_steps_that_failed_in_a_row_make_it_unavailable(failed_steps, status):
    health = judge_health(Phase.SERVING, 0.1, ReuseState.HEALTHY, (), failed_steps=failed_steps)
    assert health.status is status
