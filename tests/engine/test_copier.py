"""Copies beside the step: told of when they are done, never waited for before, and over before their units are used
again."""

import pytest

from cache import Copy, CopyObject, Fault, Faults, Tier, UnitHandle
from engine.copier import CopyReport, ImmediateCopier, StreamCopier
from engine.plan import CopyBatch, CopyOutcome
from tests.engine.late_stream import LateStream

BAD = 13
"""A unit that cannot be copied."""


def copy(unit: int, source=Tier.DEVICE, destination=Tier.HOST) -> Copy:
    return Copy(CopyObject.KV_PAGE, UnitHandle(source, (unit,)), UnitHandle(destination, (unit,)))


def batch(number: int, *units: int, **tiers) -> CopyBatch:
    return CopyBatch(number, tuple(copy(unit, **tiers) for unit in units))


RESTORE = {"source": Tier.HOST, "destination": Tier.DEVICE}


class Copies:
    """Notes the units that were copied."""

    def __init__(self):
        self.units: list[int] = []

    def __call__(self, copies):
        for each in copies:
            if each.source.unit == BAD:
                raise OSError(BAD)
            self.units.append(each.source.unit)


@pytest.fixture
def copies():
    return Copies()


class Late:
    """A copier on a stream; queueing a batch with BAD in it raises at once, as a refused call does."""

    def __init__(self, copies, faults=()):
        self.stream = LateStream()
        self.copier = StreamCopier(copies, self.stream, Faults(faults))

    def step(self, *batches, awaited=(), waits=False) -> CopyReport:
        self.copier.prepare(frozenset(awaited))
        self.copier.start(batches)
        return self.copier.finish(waits=waits)


def test_a_batch_is_told_of_by_the_step_at_whose_end_it_is_done(copies):
    late = Late(copies)
    assert late.step(batch(1, 5), batch(2, 6)) == CopyReport({}, {1, 2})
    late.stream.do_next()
    assert late.step(awaited=[1, 2]) == CopyReport({1: CopyOutcome(0.5)}, {2})
    assert late.step(awaited=[2]) == CopyReport({}, {2})
    late.stream.do_next()
    assert late.step(awaited=[2]) == CopyReport({2: CopyOutcome(0.5)}, frozenset())


def test_batches_run_in_their_order_whatever_is_waited_for(copies):
    late = Late(copies)
    late.step(batch(1, 5, 6), batch(2, 7))
    late.step(batch(3, 8), awaited=[1, 2])
    late.step(awaited=[3], waits=True)
    assert copies.units == [5, 6, 7, 8]


def test_batches_come_behind_all_that_was_queued_before_their_step_and_not_behind_its_own_work(copies):
    late = Late(copies)
    for number in (1, 2):
        late.copier.prepare(frozenset())
        marks = late.stream.marks
        late.stream.mark()
        late.copier.start([batch(number, number)])
        assert late.stream.after.pop() == marks


def test_a_step_with_nothing_else_to_do_waits_for_all_of_them(copies):
    late = Late(copies)
    late.step(batch(1, 5))
    report = late.step(batch(2, 6), awaited=[1], waits=True)
    assert report == CopyReport({1: CopyOutcome(0.5), 2: CopyOutcome(0.5)}, frozenset())


def test_what_was_given_up_is_over_before_the_next_step_and_what_is_awaited_is_not_waited_for(copies):
    late = Late(copies)
    late.step(batch(1, 5), batch(2, 6), batch(3, 7))
    late.copier.prepare(frozenset([1, 3]))
    assert [flight.done for flight in late.stream.held] == [True]
    assert copies.units == [5, 6]
    assert late.copier.finish(waits=False) == CopyReport({1: CopyOutcome(0.5)}, {3}), "nobody asks for 2 any more"


def test_a_number_that_comes_again_is_another_batch(copies):
    late = Late(copies)
    late.step(batch(1, 5))
    assert late.step(batch(1, 6)) == CopyReport({}, {1})
    assert copies.units == [5]


def test_nothing_is_under_way_after_a_step_that_raised(copies):
    late = Late(copies)
    late.step(batch(1, 5))
    late.copier.prepare(frozenset([1]))
    late.copier.start([batch(2, 6)])
    late.copier.abandon()
    assert copies.units == [5, 6]
    assert late.step(waits=True) == CopyReport({}, frozenset())


class EagerToQueue(LateStream):
    """Calls the work at once, as CUDA's queueing does, and is done later."""

    def queue(self, work, after):
        work()
        return super().queue(lambda: None, after)


@pytest.fixture(params=["at once", "beside the step"])
def copier(request, copies):
    def make(faults=()):
        if request.param == "at once":
            return ImmediateCopier(copies, Faults(faults))
        return StreamCopier(copies, EagerToQueue(), Faults(faults))

    return make


def outcomes(copier, *batches) -> dict[int, str]:
    copier.prepare(frozenset())
    copier.start(batches)
    report = copier.finish(waits=True)
    assert report.under_way == frozenset()
    return {number: str(outcome.error) for number, outcome in sorted(report.copied.items())}


def test_a_batch_that_fails_fails_alone(copier, copies):
    batches = [batch(0, 1, 2), batch(1, 3, BAD, 4), batch(2, 5)]
    assert outcomes(copier(), *batches) == {0: "None", 1: str(BAD), 2: "None"}
    assert copies.units == [1, 2, 3, 5]


def test_nothing_of_a_batch_that_failed_is_under_way_when_it_is_told(copies):
    stream = EagerToQueue()
    copier = StreamCopier(copies, stream, Faults())
    copier.prepare(frozenset())
    copier.start([batch(1, 5, BAD)])
    assert stream.waits == 1
    assert set(copier.finish(waits=False).copied) == {1}


def test_the_drill_of_failing_restores_spares_demotions(copier, copies):
    found = outcomes(copier([Fault.RESTORE_FAIL]), batch(0, 1, **RESTORE), batch(1, 2))
    assert "the fire drill restore_fail is on" in found[0]
    assert (found[1], copies.units) == ("None", [2])


def test_copies_at_once_take_some_time(copies):
    copier = ImmediateCopier(copies, Faults())
    copier.start([batch(0, 1), batch(1, BAD)])
    assert all(outcome.seconds > 0 for outcome in copier.finish(waits=False).copied.values())
