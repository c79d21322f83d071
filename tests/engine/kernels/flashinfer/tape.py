"""What a CUDA graph does, on a CPU: the operations of a step, kept with their tensors and run again at the same
addresses, with every number that the host gave frozen as it was.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from tests.engine.kernels.flashinfer.contract import require

aten = torch.ops.aten

TO_THE_HOST = {aten._local_scalar_dense.default, aten.equal.default, aten.nonzero.default, aten.is_nonzero.default}
"""What waits for the device, which no capture allows."""
FROM_THE_HOST = {aten.lift_fresh.default, aten.lift_fresh_copy.default}
"""torch.tensor([...]): a copy from pageable memory, which no capture allows either."""


class Tape(TorchDispatchMode):
    """Records what runs inside of it; `replay` runs it again. Mutable, for one recording."""

    def __init__(self) -> None:
        super().__init__()
        self._operations: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        require(func not in TO_THE_HOST, f"{func} in a captured step waits for the device")
        require(func not in FROM_THE_HOST, f"{func} in a captured step copies from the host")
        return self._run(func, args, kwargs or {})

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of the library: one operation, whatever its reference does on the host."""
        with _disable_current_modes():
            return self._run(function, args, kwargs)

    def _run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = function(*args, **kwargs)
        self._operations.append((function, args, kwargs, result))
        return result

    def replay(self) -> None:
        for function, args, kwargs, result in self._operations:
            again = function(*args, **kwargs)
            for old, new in zip(_tensors(result), _tensors(again), strict=True):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


class TapedLibrary:
    """The library, whose calls go to a tape while there is one."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self.tape: Tape | None = None

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._library, name)
        if name.endswith("Wrapper"):
            return lambda *args, **kwargs: _TapedWrapper(self, found(*args, **kwargs))
        return lambda *args, **kwargs: self.run(found, args, kwargs)

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return function(*args, **kwargs) if self.tape is None else self.tape.call(function, args, kwargs)


class _TapedWrapper:
    def __init__(self, owner: TapedLibrary, wrapper: Any) -> None:
        self._owner, self._wrapper = owner, wrapper

    def plan(self, *args: Any, **kwargs: Any) -> None:
        require(self._owner.tape is None, "plan in a captured step")
        self._wrapper.plan(*args, **kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        return self._owner.run(self._wrapper.run, args, kwargs)
