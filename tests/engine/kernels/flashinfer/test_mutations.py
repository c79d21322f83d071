"""The contract would tell: each mistake of the table makes the check fail that the table names."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.kernels.flashinfer.checks import CHECKS
from tests.engine.kernels.flashinfer.mutations import MUTATIONS, MutatedLibrary, mutate_plan, table
from tests.engine.kernels.flashinfer.rig import make_rig

DOCS = Path(__file__).parents[4] / "docs" / "cuda-contract.md"


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.mistake)
def test_a_mistake_is_told(mutation):
    libraries = []

    def alter(library):
        libraries.append(MutatedLibrary(library, mutation))
        return libraries[-1]

    rig = make_rig(alter=alter)
    if mutation.call == "plan":
        mutate_plan(rig.kernels, mutation)
    with pytest.raises((AssertionError, ValueError)):
        CHECKS[mutation.caught_by](rig)
    assert mutation.call == "plan" or any(library.was_applied for library in libraries), "the call was not made"


def test_the_docs_hold_the_table():
    assert table() in DOCS.read_text()


def test_no_two_mistakes_have_one_name():
    assert len({mutation.mistake for mutation in MUTATIONS}) == len(MUTATIONS)
