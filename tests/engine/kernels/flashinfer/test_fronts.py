"""The backend's calls through flashinfer's own Python: it checks, converts and routes them before a kernel starts."""

from __future__ import annotations

import pytest

from tests.engine.kernels.flashinfer.checks import CHECKS
from tests.engine.kernels.flashinfer.fronts import FrontLibrary, fronts_on
from tests.engine.kernels.flashinfer.mutations import MUTATIONS, MutatedLibrary
from tests.engine.kernels.flashinfer.reference_library import ReferenceLibrary
from tests.engine.kernels.flashinfer.rig import ARCHITECTURES, make_rig

ROUTED = (
    "attention",
    "kinds_of_attention",
    "fp8_pages",
    "gated_delta_rule",
    "decodes_in_buffers",
    "append",
    "rope",
    "rms_norm",
    "fused_add_rms_norm",
)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("check", ROUTED)
def test_the_librarys_own_checks_and_routing_let_the_calls_through(check, architecture):
    traits = ARCHITECTURES[architecture]
    leaves = ReferenceLibrary()
    with fronts_on(traits, leaves):
        CHECKS[check](make_rig(traits=traits, alter=FrontLibrary))
    if check == "gated_delta_rule":
        assert leaves.called("chunk_gated_delta_rule")
        assert bool(leaves.called("gated_delta_rule_decode_pretranspose")) == (architecture != "sm89")


@pytest.mark.parametrize(
    "mistake",
    ["without the causal mask", "keys and values swapped, read", "another slot written", "queries not scaled"],
)
def test_a_mistake_is_told_behind_it_too(mistake):
    mutation = next(mutation for mutation in MUTATIONS if mutation.mistake == mistake)
    traits = ARCHITECTURES["sm90"]
    with fronts_on(traits, ReferenceLibrary()), pytest.raises(AssertionError):
        CHECKS[mutation.caught_by](
            make_rig(traits=traits, alter=lambda library: MutatedLibrary(FrontLibrary(library), mutation))
        )
