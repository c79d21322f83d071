"""The names, parameters and types that the backend relies on are those of the installed flashinfer.

Every call of the checks is bound to the installed signature and held to the library's templates as it is made; here it
is shown that none was left out, and that a renamed parameter would be seen.
"""

from __future__ import annotations

import inspect

import pytest
import torch

from engine.kernels.flashinfer.library import FUNCTIONS, load_library
from tests.engine.kernels.flashinfer import contract
from tests.engine.kernels.flashinfer.checks import CHECKS, PARTS
from tests.engine.kernels.flashinfer.contract import Call, ContractError, TensorRecord, signature, templates
from tests.engine.kernels.flashinfer.rig import make_rig

WRAPPERS = ("BatchPrefillWithPagedKVCacheWrapper", "BatchDecodeWithPagedKVCacheWrapper")
WITHOUT_TEMPLATE = {"prepare_bf16_fp4_weights", "nvfp4_block_scale_interleave"}
"""Their references are the real function, and the inverse of what the templates' references undo."""
ONLY_ON_BLACKWELL = {"mm_bf16_fp4", "prepare_bf16_fp4_weights"}
"""Needs a GPU to choose a layout by; tests/engine/kernels/linear calls it with the layouts given."""


@pytest.fixture(scope="module")
def calls() -> list[Call]:
    """Those of all checks, one for each set of parameters that a function was called with."""
    libraries = []

    def keep(library):
        libraries.append(library)
        return library

    for name, check in CHECKS.items():
        if name not in PARTS:
            check(make_rig(alter=keep))
    distinct = {}
    for library in libraries:
        for call in library.calls:
            distinct.setdefault((call.name, *sorted(call.arguments)), call)
    return list(distinct.values())


def test_the_installed_library_has_every_name():
    library = load_library()
    assert [name for name in FUNCTIONS if not callable(getattr(library, name))] == []


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name not in WITHOUT_TEMPLATE | set(WRAPPERS)])
def test_each_function_has_a_template_with_a_reference(name):
    assert any(template.reference is not None for template in templates(name))


def test_every_function_is_called_by_the_checks(calls):
    called = {call.name.partition(".")[0] for call in calls}
    assert set(FUNCTIONS) - called == ONLY_ON_BLACKWELL
    for wrapper in WRAPPERS:
        assert {call.name for call in calls} >= {f"{wrapper}.plan", f"{wrapper}.run"}


def test_every_parameter_in_use_is_in_the_installed_signature(calls):
    unknown = {
        (call.name, key) for call in calls for key in call.arguments if key not in signature(call.name).parameters
    }
    assert unknown == set()


def test_a_renamed_parameter_is_seen(calls, monkeypatch):
    """For every parameter that is in use: with another name in the signature, the same call is refused."""
    missed = []
    for call in calls:
        installed = signature(call.name)
        given = ({"self": None} if "self" in installed.parameters else {}) | call.arguments
        for key in call.arguments:
            renamed = [
                parameter.replace(name=f"{name}_") if name == key else parameter
                for name, parameter in installed.parameters.items()
            ]
            monkeypatch.setattr(contract, "signature", lambda name, renamed=renamed: inspect.Signature(renamed))
            try:
                contract.bind(call.name, (), given)
            except ContractError:
                continue
            missed.append((call.name, key))
    assert missed == []


def test_a_tensor_where_a_number_is_taken_is_refused():
    library = make_rig().library
    with pytest.raises(ContractError, match="eps"):
        library.rmsnorm(input=torch.ones(2, 16).bfloat16(), weight=torch.ones(16).bfloat16(), eps=torch.tensor(1e-6))


def test_indices_are_int32_and_states_float32(calls):
    """What the kernels read through pointers of those types, whatever they are given."""
    indices = {"positions", "batch_indices", "kv_indices", "kv_indptr", "indptr", "indices", "last_page_len"}
    for call in calls:
        for key, value in call.arguments.items():
            if isinstance(value, TensorRecord) and (
                key in indices or key.endswith(("_indices", "_indptr", "page_len"))
            ):
                assert value.dtype == torch.int32, f"{call.name}: {key} is {value.dtype}"
            if isinstance(value, TensorRecord) and key in ("initial_state", "output_state", "state_checkpoints"):
                assert value.dtype == torch.float32, f"{call.name}: {key} is {value.dtype}"
