"""Reading a Hugging Face config.json field by field, so that a value nobody supports is refused by its name."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from engine.errors import UnsupportedConfigError
from engine.models.config import RopeConfig

# The parameters of each kind of rotary scaling: required, then optional.
_ROPE_PARAMETERS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
}
_EXPERT_FIELDS = ("num_experts", "num_local_experts", "n_routed_experts")

# What any config may hold and no logit depends on: training, the loss, the library that wrote it, special tokens.
_WITHOUT_EFFECT = frozenset(
    {
        "architectures",
        "attention_dropout",
        "bos_token_id",
        "chunk_size_feed_forward",
        "compression_config",
        "dtype",
        "eos_token_id",
        "id2label",
        "initializer_range",
        "label2id",
        "model_type",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "problem_type",
        "quantization_config",
        "return_dict",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
_ROPE_FIELDS = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor")
# A parameter of another kind than the one that is set has no effect.
_KNOWN_IN_ROPE = (
    "rope_type",
    "type",
    "mrope_section",
    "mrope_interleaved",
    *(name for parameters in _ROPE_PARAMETERS.values() for names in parameters for name in names),
)

MAX_POSITIONS = 1 << 24
"""Far above any model; a rotary table for more would take gigabytes."""


class ConfigFields:
    """One object of config.json; it remembers what was read of it. `path` goes before its fields' names in errors."""

    def __init__(self, raw: dict[str, Any], path: str = "") -> None:
        self.raw = raw
        self.path = path
        self._read: set[str] = set()

    def name(self, field: str) -> str:
        return f"{self.path}{field}"

    def integer(self, field: str, default: int | None = None) -> int:
        """A whole number of at least 1."""
        value = self._get(field, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UnsupportedConfigError(self.name(field), value, "a whole number of at least 1")
        return value

    def positions(self, field: str, default: int | None = None) -> int:
        """A context length in tokens."""
        value = self.integer(field, default)
        if value > MAX_POSITIONS:
            raise UnsupportedConfigError(self.name(field), value, f"at most {MAX_POSITIONS:,} positions")
        return value

    def number(self, field: str, default: float | None = None) -> float:
        value = self._get(field, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UnsupportedConfigError(self.name(field), value, "a number")
        return float(value)

    def boolean(self, field: str, default: bool) -> bool:
        value = self._get(field, default)
        if not isinstance(value, bool):
            raise UnsupportedConfigError(self.name(field), value, "true or false")
        return value

    def section(self, field: str) -> ConfigFields:
        value = self.raw.get(field)
        if not isinstance(value, dict):
            raise UnsupportedConfigError(self.name(field), value, "an object")
        return ConfigFields(value, f"{self.name(field)}.")

    def require(self, field: str, supported: Collection[object], default: object) -> None:
        """Refuse a value that is not among `supported`; an absent or null field has the default."""
        value = self._get(field, default)
        if value not in supported:
            raise UnsupportedConfigError(self.name(field), value, " or ".join(str(one) for one in supported))

    def refuse_experts(self) -> None:
        for field in _EXPERT_FIELDS:
            if self.raw.get(field):
                raise UnsupportedConfigError(self.name(field), self.raw[field], "a dense model, without experts")

    def refuse_unread(self, without_effect: Collection[str]) -> None:
        """Refuse a field that nothing has read, that is switched on, and of which it is not known that no logit depends
        on it: it may be what a new model does differently."""
        known = {*self._read, *_WITHOUT_EFFECT, *_ROPE_FIELDS, *_EXPERT_FIELDS, *without_effect}
        for field, value in self.raw.items():
            if field not in known and not field.startswith("_") and value not in (None, False, 0, "", [], {}):
                raise UnsupportedConfigError(
                    self.name(field), value, "no such field: what it changes is not known here, and may be the answers"
                )

    def refuse_contradiction(self, outer: ConfigFields) -> None:
        """Refuse a field of `outer` that says otherwise than the one of its name that was read here."""
        for field in sorted({*self._read, *_ROPE_FIELDS} & outer.raw.keys()):
            if outer.raw[field] is not None and outer.raw[field] != self.raw.get(field):
                inside = f"what {self.name(field)} is: {self.raw.get(field)!r}"
                raise UnsupportedConfigError(outer.name(field), outer.raw[field], inside)

    def _get(self, field: str, default: object) -> Any:
        self._read.add(field)
        value = self.raw.get(field)
        return default if value is None else value


def read_rope(fields: ConfigFields, head_dim: int, max_position_embeddings: int, partial_default: float) -> RopeConfig:
    """`rope_parameters` as transformers 5 writes it, or `rope_theta` and `rope_scaling` as it did before.

    `mrope_section` is accepted: the three position axes of a multimodal model are equal on text, which makes its
    rotation the plain one.
    """
    raw, origin = _rope_section(fields)
    rope = ConfigFields(raw, f"{fields.name(origin)}.")
    kind = raw.get("rope_type") or raw.get("type") or "default"
    if kind == "mrope":  # what "default" with an mrope_section was called in earlier configs
        kind = "default"
    if kind not in _ROPE_PARAMETERS:
        raise UnsupportedConfigError(rope.name("rope_type"), kind, ", ".join(_ROPE_PARAMETERS))
    theta = rope.number("rope_theta", fields.number("rope_theta", 10_000.0))
    partial = rope.number("partial_rotary_factor", fields.number("partial_rotary_factor", partial_default))
    rotary_dim = int(head_dim * partial)
    if not 0 < rotary_dim <= head_dim or rotary_dim % 2:
        raise UnsupportedConfigError(rope.name("partial_rotary_factor"), partial, f"an even share of {head_dim} dims")
    required, optional = _ROPE_PARAMETERS[kind]
    rope.refuse_unread(_KNOWN_IN_ROPE)
    parameters: dict[str, float] = {}
    for name in (*required, *(name for name in optional if raw.get(name) is not None)):
        if name == "original_max_position_embeddings":
            outer = fields.number(name, float(max_position_embeddings))
            parameters[name] = outer if fields.raw.get(name) is not None else rope.number(name, outer)
        elif name == "truncate":
            parameters[name] = float(rope.boolean(name, True))
        else:
            parameters[name] = rope.number(name)
    return RopeConfig(theta=theta, rotary_dim=rotary_dim, scaling=kind, parameters=tuple(sorted(parameters.items())))


def _rope_section(fields: ConfigFields) -> tuple[dict[str, Any], str]:
    for origin in ("rope_scaling", "rope_parameters"):
        raw = fields.raw.get(origin)
        if raw is None:
            continue
        if not isinstance(raw, dict) or any(isinstance(value, dict) for value in raw.values()):
            raise UnsupportedConfigError(fields.name(origin), raw, "one flat object for all layers")
        return raw, origin
    return {}, "rope_parameters"


def read_eos_token_ids(*configs: dict[str, Any]) -> tuple[int, ...]:
    """`eos_token_id` (one or a list) of the first config that has it."""
    for raw in configs:
        value = raw.get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if any(isinstance(one, bool) or not isinstance(one, int) or one < 0 for one in ids):
            raise UnsupportedConfigError("eos_token_id", value, "a token id or a list of token ids")
        return tuple(ids)
    return ()
