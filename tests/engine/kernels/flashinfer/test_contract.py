"""Each kernel of the flashinfer backend against the torch backend in float32, over the reference library."""

from __future__ import annotations

import pytest

from tests.engine.kernels.flashinfer.checks import BY_ARCHITECTURE, CHECKS, PARTS
from tests.engine.kernels.flashinfer.rig import ARCHITECTURES, DTYPES, HOPPER, make_rig


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("check", [name for name in CHECKS if name not in PARTS])
def test_a_kernel_is_that_of_torch(check, dtype):
    CHECKS[check](make_rig(DTYPES[dtype], HOPPER))


@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if ARCHITECTURES[name] != HOPPER])
@pytest.mark.parametrize("check", sorted(BY_ARCHITECTURE))
def test_a_kernel_is_that_of_torch_where_another_one_is_chosen(check, architecture):
    CHECKS[check](make_rig(traits=ARCHITECTURES[architecture]))
