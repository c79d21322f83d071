"""Each kernel of the flashinfer backend against the torch backend in float32, over the reference library."""

from __future__ import annotations

import pytest

from tests.engine.kernels.flashinfer.checks import CHECKS
from tests.engine.kernels.flashinfer.rig import ARCHITECTURES, DTYPES, make_rig


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("check", CHECKS)
def test_a_kernel_is_that_of_torch(check, dtype, architecture):
    CHECKS[check](make_rig(DTYPES[dtype], ARCHITECTURES[architecture]))
