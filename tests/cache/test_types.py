"""The records that cross the cache's border."""

import pytest

from cache import Tier, UnitHandle


def test_a_handle_of_one_unit_names_it():
    assert UnitHandle(Tier.DEVICE, (7,)).unit == 7


@pytest.mark.parametrize("units", [(), (7, 3)], ids=["none", "several"])
def test_a_handle_of_another_number_of_units_does_not_pick_one(units):
    with pytest.raises(ValueError, match=f"this handle has {len(units)}"):
        _ = UnitHandle(Tier.HOST, units).unit
