"""The records that cross the cache's border, and the sizes that it is made with."""

import pytest

from cache import CacheOptions, Copy, CopyObject, Tier, UnitHandle

SIZES = {"page_size": 16, "kv_pages": 100, "state_slots": 24, "has_state": True}


def test_a_handle_of_one_unit_names_it():
    assert UnitHandle(Tier.DEVICE, (7,)).unit == 7


@pytest.mark.parametrize("units", [(), (7, 3)], ids=["none", "several"])
def test_a_handle_of_another_number_of_units_does_not_pick_one(units):
    with pytest.raises(ValueError, match=f"this handle has {len(units)}"):
        _ = UnitHandle(Tier.HOST, units).unit


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"page_size": 0}, "page_size must be at least 1, not 0"),
        ({"state_slots": 0}, "at least 1 state slot, not 0"),
        ({"host_units": -1}, "host_units must be at least 0, not -1"),
        ({"host_state_cap": -2}, "host_state_cap must be at least 0, not -2"),
        ({"demote_ahead": -1}, "demote_ahead must be at least 0, not -1"),
        ({"ghost_nodes": -1}, "ghost_nodes must be at least 0, not -1"),
        ({"host_units_per_state": 0}, "host_units_per_state must be at least 1, not 0"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        CacheOptions(**{**SIZES, **wrong})


def test_the_smallest_sizes_are_accepted():
    CacheOptions(1, 0, 1, True, host_units=0, host_units_per_state=1, host_state_cap=0, demote_ahead=0, ghost_nodes=0)
    CacheOptions(1, 0, 0, has_state=False)


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (16, 1), (17, 2)])
def test_a_part_of_a_page_takes_a_whole_one(tokens, pages):
    assert CacheOptions(**SIZES).pages_of(tokens) == pages


@pytest.mark.parametrize(("slots", "ready"), [(1, 2), (16, 2), (24, 3), (40, 5)])
def test_one_checkpoint_is_kept_ready_for_each_eight_slots_and_two_at_least(slots, ready):
    assert CacheOptions(**{**SIZES, "state_slots": slots}).ready_checkpoints == ready


def test_how_many_are_kept_ready_can_be_told():
    assert CacheOptions(**SIZES, demote_ahead=0).ready_checkpoints == 0


def test_twice_as_many_pages_are_known_as_fit_unless_told_otherwise():
    assert CacheOptions(**SIZES, host_units=20).most_ghost_nodes == 240
    assert CacheOptions(**SIZES, host_units=20, ghost_nodes=3).most_ghost_nodes == 3


def test_bytes_are_counted_by_what_is_copied():
    unit = UnitHandle(Tier.DEVICE, (0,))
    copies = [Copy(what, unit, unit) for what in (CopyObject.KV_PAGE, CopyObject.STATE, CopyObject.KV_PAGE)]
    assert CacheOptions(**SIZES, page_bytes=10, state_bytes=100).bytes_of(copies) == 120
