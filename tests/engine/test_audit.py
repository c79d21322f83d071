"""The engine checks its own books: often enough, not too often, and what it finds is told once."""

import logging

import pytest

from cache import Holder, UnitState
from engine.audit import AUDIT_SECONDS, IDLE_SECONDS, Auditor
from tests.engine.house import House


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def auditor(clock):
    return Auditor(clock)


def audits_at(auditor, clock, scheduler, seconds, *, is_idle) -> bool:
    before = scheduler.cache.stats.audits
    clock.now = seconds
    auditor.audit_if_due(scheduler, is_idle=is_idle)
    return scheduler.cache.stats.audits > before


@pytest.mark.parametrize("is_idle", [False, True])
def test_books_are_checked_on_a_timer(auditor, clock, is_idle):
    scheduler = House().scheduler
    times = [0.0, AUDIT_SECONDS - 0.1, AUDIT_SECONDS, AUDIT_SECONDS + 0.1, 2 * AUDIT_SECONDS]
    audited = [audits_at(auditor, clock, scheduler, seconds, is_idle=is_idle) for seconds in times]
    assert audited == [False, False, True, False, True]


def test_an_idle_engine_checks_once_after_its_work(auditor, clock):
    scheduler = House().scheduler
    auditor.worked()
    times = [0.0, IDLE_SECONDS, 2 * IDLE_SECONDS]
    assert [audits_at(auditor, clock, scheduler, t, is_idle=True) for t in times] == [False, True, False]
    auditor.worked()
    assert audits_at(auditor, clock, scheduler, 3 * IDLE_SECONDS, is_idle=True)


@pytest.mark.parametrize(("is_idle", "pause_seconds"), [(False, 1000.0), (True, 100.0)])
def test_an_audit_that_takes_long_is_held_more_seldom(auditor, clock, monkeypatch, is_idle, pause_seconds):
    scheduler = House().scheduler

    def slow_check():
        clock.now += 1.0
        return []

    monkeypatch.setattr(scheduler, "check_sequences", slow_check)
    assert audits_at(auditor, clock, scheduler, AUDIT_SECONDS, is_idle=False)
    monkeypatch.undo()
    end = clock.now
    assert not audits_at(auditor, clock, scheduler, end + pause_seconds - 1, is_idle=is_idle)
    assert audits_at(auditor, clock, scheduler, end + pause_seconds, is_idle=is_idle)


def test_what_nobody_holds_is_given_back_and_told(auditor, caplog):
    house = House()
    house.cache.pages.lease(Holder(UnitState.PINNED, "nobody"), 3)
    report = auditor.audit(house.scheduler)
    assert report.reclaimed == {"device_kv_pages": 3}
    assert report.remaining == ()
    assert house.cache.pages.free == house.cache.pages.capacity
    assert [(each.levelno, each.message) for each in caplog.records] == [
        (logging.WARNING, "an audit gave back units that nobody held: 3 of device_kv_pages")
    ]
    assert auditor.last is report


def test_what_remains_is_told_once(auditor, caplog):
    house = House()
    house.submit("a", range(9))
    house.step()
    (sequence,) = house.scheduler.running
    sequence.held.pages.reverse()
    for _ in range(3):
        report = auditor.audit(house.scheduler)
        assert report.remaining == ("request 'a': its block table differs from its lease",)
    assert len(caplog.records) == 1
    assert house.cache.stats.violations == 3
    sequence.held.pages.reverse()
    assert auditor.audit(house.scheduler).violations == ()
