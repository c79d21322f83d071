"""A missing program skips its tests on a developer's machine and fails them in CI."""

import pytest
from _pytest.outcomes import Failed, Skipped

from tests.programs import needs_program


def test_a_program_that_is_there_is_found():
    assert needs_program("sh", package="dash").endswith("/sh")


@pytest.mark.parametrize("value", ["", "0", "false"])
@pytest.mark.filterwarnings("ignore:tests are SKIPPED")
def test_a_missing_program_skips_its_test_and_names_the_package(monkeypatch, value):
    monkeypatch.setenv("CI", value)
    with pytest.raises(Skipped, match="apt-get install frobnicate"):
        needs_program("no-such-program", package="frobnicate")


@pytest.mark.parametrize("value", ["true", "1"])
def test_a_missing_program_fails_its_test_in_ci(monkeypatch, value):
    monkeypatch.setenv("CI", value)
    with pytest.raises(Failed, match="apt-get install frobnicate"):
        needs_program("no-such-program", package="frobnicate")
