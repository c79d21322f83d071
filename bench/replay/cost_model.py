"""What a model costs in time and bytes: the preset that stands for the GPU in a simulation."""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass, fields
from importlib import resources
from pathlib import Path

from engine.errors import UnusableOptionError

DEFAULT_PRESET = "27b-hybrid"


@dataclass(frozen=True, slots=True)
class CostModel:
    """One model on one machine. Each figure is a constant: steps of a real GPU vary, ratios between policies do not."""

    title: str
    kv_bytes_per_token: int
    """Over all attention layers."""
    state_bytes: int
    """One state image over all recurrent layers; 0 for a model without."""
    page_tokens: int
    prefill_chunk_tokens: int
    prefill_tokens_per_second: float
    decode_step_seconds: float
    """One token for one request."""
    decode_step_seconds_per_request: float
    """What each further request adds to it."""
    host_to_device_bytes_per_second: float
    device_to_host_bytes_per_second: float
    device_copy_bytes_per_second: float
    """Within the device: captures, and what a request copies before it writes."""

    def decode_seconds(self, requests: int) -> float:
        """One step of so many requests."""
        return self.decode_step_seconds + self.decode_step_seconds_per_request * (requests - 1) if requests else 0.0


def preset_names() -> list[str]:
    """Those that come with the package."""
    folder = resources.files("bench.replay") / "presets"
    return sorted(file.name.removesuffix(".toml") for file in folder.iterdir() if file.name.endswith(".toml"))


def load_preset(name: str) -> CostModel:
    """A preset by its name, or from a TOML file. Raises UnusableOptionError for what is missing, unknown or wrong."""
    if name in preset_names():
        text = (resources.files("bench.replay") / "presets" / f"{name}.toml").read_text(encoding="utf-8")
    elif Path(name).is_file():
        text = Path(name).read_text(encoding="utf-8")
    else:
        known = ", ".join(preset_names())
        raise UnusableOptionError(f"preset {name!r} is neither a file nor one of {known}; name one of them")
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UnusableOptionError(f"preset {name!r} is not TOML: {error}; see docs/replay.md") from None
    return _checked(name, values)


def _checked(name: str, values: dict[str, object]) -> CostModel:
    expected = {field.name: field.type for field in fields(CostModel)}
    for key in values.keys() - expected.keys():
        raise UnusableOptionError(f"preset {name!r}: unknown key {key!r}; known are {', '.join(expected)}")
    for key, kind in expected.items():
        if key not in values:
            raise UnusableOptionError(f"preset {name!r}: key {key!r} is missing; see docs/replay.md")
        value = values[key]
        if kind == "str":
            is_right = isinstance(value, str)
        else:
            is_number = isinstance(value, int) or (kind == "float" and isinstance(value, float))
            can_be_0 = key in ("state_bytes", "decode_step_seconds_per_request")
            is_right = is_number and not isinstance(value, bool) and _is_size(value, can_be_0)
        if not is_right:
            raise UnusableOptionError(f"preset {name!r}: {key} is {value!r}, expected {_EXPECTED[str(kind)]}")
    return CostModel(**values)  # type: ignore[arg-type]


_EXPECTED = {"str": "a text", "int": "a whole number above 0", "float": "a number above 0"}


def _is_size(value: object, can_be_0: bool) -> bool:
    assert isinstance(value, int | float)
    return math.isfinite(value) and (value > 0 or (can_be_0 and value == 0))
