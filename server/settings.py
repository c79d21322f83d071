"""The schema of the configuration: every key, its default, its meaning and the values that it takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_origin

from annotated_types import Ge, Gt, Le, MinLen
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, SecretStr, TypeAdapter
from pydantic.fields import FieldInfo

ENV_PREFIX = "DALSEGNO_"

MAX_MESSAGES = 2**15
"""No setting allows more messages in a conversation than this."""

Auto = Literal["auto"]
Count = Annotated[int, Ge(1)] | Auto


def _key(default: Any, meaning: str, expected: str, *, flag: str | None = None, aliases: tuple[str, ...] = ()) -> Any:
    """Declare one key; `expected` completes "expected ..." in an error, `flag` is given where it isn't the name,
    `aliases` are the flags of other servers that mean the same."""
    extra: dict[str, Any] = {"expected": expected, "flag": flag, "aliases": list(aliases)}
    return Field(default=default, description=meaning, json_schema_extra=extra)


class Section(BaseModel):
    """One table of the configuration file."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class ServerSettings(Section):
    """What a client sees."""

    host: Annotated[str, MinLen(1)] = _key("127.0.0.1", "address to listen on", "a host name or an address")
    port: Annotated[int, Ge(0), Le(65535)] = _key(
        8000, "port to listen on; 0 takes a free one", "an integer from 0 to 65535"
    )
    model: Annotated[str, MinLen(1)] = _key(
        "demo",
        "model to serve: a folder in Hugging Face layout, a hub id, or a short name (demo, smollm2)",
        "a folder, a hub id or a short name",
        flag="MODEL",
        aliases=("--model", "-m", "--model-path"),
    )
    model_name: Annotated[str, MinLen(1)] = _key(
        "auto", "public id of the model; auto: the first served name, else from the checkpoint", "a name"
    )
    served_model_names: tuple[Annotated[str, MinLen(1)], ...] = _key(
        (),
        "names that requests may call the model by, beside its public id",
        "one or more names",
        flag="--served-model-name",
        aliases=("--alias", "-a"),
    )
    any_model: bool = _key(
        False, "answer whatever name a request calls the model by", "true or false", flag="--any-model"
    )
    api_keys: tuple[Annotated[SecretStr, MinLen(1)], ...] = _key(
        (),
        "keys that clients must send as a bearer token or x-api-key; @FILE reads one per line; none: open to all",
        "one or more keys, or @FILE with one key per line",
        flag="--api-key",
    )
    admin_key: SecretStr = _key(
        SecretStr(""),
        "key for /admin, by the same headers; @FILE reads it; empty: /admin answers clients on this machine only",
        "a key, or @FILE with one key",
    )
    allowed_hosts: tuple[Annotated[str, MinLen(1)], ...] = _key(
        (),
        "names by which clients without a key may ask for this daemon, beside its own and its addresses; *: any",
        "one or more host names, or *",
    )
    max_connections: Annotated[int, Ge(1)] = _key(
        1000,
        "connections that may be open, at most half of the open files allowed; one more takes the place of the one "
        "that waits longest without a request, or gets 503",
        "an integer, 1 or more",
    )
    header_timeout_s: Annotated[FiniteFloat, Gt(0)] = _key(
        10.0,
        "seconds from a request's first byte to the end of its headers, then 408",
        "a number of seconds above 0",
    )
    body_timeout_s: Annotated[FiniteFloat, Gt(0)] = _key(
        60.0,
        "seconds that a request's body may stand still or drip, then 408, and that an answer may stay unread",
        "a number of seconds above 0",
    )
    cors_origins: tuple[Annotated[str, MinLen(1)], ...] = _key(
        (),
        "origins of web pages that may call this daemon from a browser, such as https://chat.example; *: any",
        "one or more origins, or *",
    )
    drain_timeout_s: Annotated[FiniteFloat, Gt(0)] = _key(
        25.0,
        "seconds that the daemon takes to end at most, after SIGTERM, while requests run; at once when none does",
        "a number of seconds above 0",
    )
    max_body_mib: Count = _key(
        "auto",
        "largest body of a request in MiB; auto: 1 MiB and 16 bytes for each token of the context",
        "an integer number of MiB, 1 or more, or auto",
    )
    max_messages: Annotated[int, Ge(1), Le(MAX_MESSAGES)] = _key(
        4096, "most messages of a conversation", f"an integer from 1 to {MAX_MESSAGES}"
    )


class EngineSettings(Section):
    """How requests run."""

    max_concurrency: Annotated[int, Ge(1), Le(1024)] = _key(
        8,
        "requests that run at the same time",
        "an integer from 1 to 1024",
        aliases=("--max-num-seqs", "--max-running-requests", "--parallel", "-np"),
    )
    max_pending_requests: Annotated[int, Ge(0)] = _key(
        64,
        "requests that may wait for their turn; one more gets 429",
        "an integer, 0 or more",
        aliases=("--max-queued-requests",),
    )
    pending_timeout_s: Annotated[FiniteFloat, Gt(0)] = _key(
        60.0, "seconds that a request may wait for its turn, then 503", "a number of seconds above 0"
    )
    max_context: Annotated[int, Ge(2)] | Auto = _key(
        "auto",
        "tokens of prompt and answer together; auto: the model's, at most what fits",
        "an integer, 2 or more, or auto",
        aliases=("--max-model-len", "--context-length", "--ctx-size", "-c"),
    )
    prefill_chunk: Count = _key(
        "auto",
        "prompt tokens computed in one step; auto: 512 (CPU), 2048 (CUDA)",
        "an integer, 1 or more, or auto",
        aliases=("--chunked-prefill-size",),
    )
    default_max_tokens: Annotated[int, Ge(1)] = _key(
        4096,
        "longest answer in tokens when a request does not say",
        "an integer, 1 or more",
        aliases=("--n-predict", "--predict", "-n"),
    )
    backend: Literal["auto", "torch", "flashinfer"] = _key(
        "auto",
        "kernels to compute with; auto: flashinfer where there is a GPU and the package, else torch on the CPU",
        "auto, torch or flashinfer",
    )
    activations: Literal["auto", "bf16", "fp4"] = _key(
        "auto",
        "what NVFP4 layers multiply their weights with on a GPU; auto: fp4 where it can and the checkpoint has scales "
        "for it, else bf16",
        "auto, bf16 or fp4",
    )
    parse_special_tokens: bool = _key(
        False,
        "take special tokens that are spelled out in a message for real ones, so that whoever writes one writes turns",
        "true or false",
    )


class CacheSettings(Section):
    """How much is remembered."""

    kv_pages: Count = _key(
        "auto",
        "pages of attention KV on the device; auto: from the memory there",
        "an integer, 1 or more, or auto",
        aliases=("--num-gpu-blocks-override",),
    )
    kv_cache_mib: Count = _key(
        "auto", "the same as a size in MiB; give one of the two", "an integer number of MiB, 1 or more, or auto"
    )
    kv_cache_dtype: Literal["auto", "fp8"] = _key(
        "auto", "how keys and values are stored; auto: as the kernels compute; fp8: in half of the bytes", "auto or fp8"
    )
    page_size: Count = _key(
        "auto",
        "tokens in a page; auto: 16 (CPU), 64 (CUDA)",
        "an integer, 1 or more, or auto",
        aliases=("--block-size",),
    )
    device_state_slots: Annotated[int, Ge(0)] | Auto = _key(
        "auto",
        "checkpoints of recurrent state on the device, beyond the running requests; auto: 16 (CPU), from the memory "
        "there (CUDA)",
        "an integer, 0 or more, or auto",
    )
    host_cache_mib: Annotated[int, Ge(0)] | Auto = _key(
        "auto",
        "MiB of host memory for KV and states that left the device; 0: none; auto: at most a quarter of the RAM",
        "an integer number of MiB, 0 or more, or auto",
        aliases=("--cache-ram", "-cram"),
    )
    host_state_slots: Annotated[int, Ge(1)] | Literal["none"] = _key(
        "none",
        "most checkpoints of recurrent state in host memory; none: as many as fit",
        "an integer, 1 or more, or none",
    )
    prefix_reuse: bool = _key(
        True,
        "remember prompts between requests",
        "true or false",
        flag="--no-prefix-reuse",
        aliases=("--no-enable-prefix-caching", "--disable-radix-cache"),
    )
    cache_isolation: Literal["auto", "shared", "key"] = _key(
        "auto",
        "who shares what is remembered: all clients, or those with the same API key; auto: key where there are two "
        "keys or more",
        "auto, shared or key",
    )
    self_heal: bool = _key(
        True, "give back what an audit finds that nobody holds", "true or false", flag="--no-self-heal"
    )


class OpsSettings(Section):
    """What an operator sees."""

    log_level: Literal["debug", "info", "warning", "error"] = _key(
        "info", "least severe message to log", "debug, info, warning or error"
    )
    log_format: Literal["auto", "console", "json"] = _key(
        "auto", "form of the log on standard error; auto: console on a terminal, else json", "auto, console or json"
    )
    event_log: Annotated[str, MinLen(1)] = _key(
        "none", "file that every event is appended to, one JSON object a line; none: no such file", "a file, or none"
    )
    throughput_interval_s: Annotated[FiniteFloat, Gt(0)] = _key(
        5.0, "seconds that a throughput event covers", "a number of seconds above 0"
    )
    metrics_compat: Literal["none", "vllm"] = _key(
        "none", "whose names /metrics has beside our own, for routers and autoscalers that know those", "none or vllm"
    )


class Settings(Section):
    """The whole configuration."""

    server: ServerSettings = Field(default_factory=ServerSettings)
    engine: EngineSettings = Field(default_factory=EngineSettings)
    cache: CacheSettings = Field(default_factory=CacheSettings)
    ops: OpsSettings = Field(default_factory=OpsSettings)

    @property
    def has_several_keys(self) -> bool:
        """Whether there are clients that can be told apart."""
        return len(set(self.server.api_keys)) > 1

    @property
    def isolates_keys(self) -> bool:
        """Whether what is remembered is shared by the holders of one API key only."""
        isolation = self.cache.cache_isolation
        return self.has_several_keys if isolation == "auto" else isolation == "key"


NOT_BUILT_KEYS = frozenset(
    {
        "cache.disk_cache",
        "cache.disk_cache_mib",
    }
)
"""Keys that this version knows of and refuses, because they would have no effect."""

NOT_BUILT_FLAGS = frozenset(
    {
        *(f"--{key.split('.')[1].replace('_', '-')}" for key in NOT_BUILT_KEYS),
    }
)


@dataclass(frozen=True, slots=True)
class Key:
    """One key of the configuration, with everything that its flag, its variable and its error message need."""

    section: str
    name: str
    field: FieldInfo

    @property
    def dotted(self) -> str:
        return f"{self.section}.{self.name}"

    @property
    def env(self) -> str:
        return f"{ENV_PREFIX}{self.section.upper()}_{self.name.upper()}"

    @property
    def flag(self) -> str:
        return self._extra["flag"] or f"--{self.name.replace('_', '-')}"

    @property
    def aliases(self) -> tuple[str, ...]:
        """What the flag is called elsewhere."""
        return tuple(self._extra["aliases"])

    @property
    def meaning(self) -> str:
        return self.field.description or ""

    @property
    def expected(self) -> str:
        return str(self._extra["expected"])

    @property
    def default(self) -> Any:
        return self.field.default

    @property
    def is_list(self) -> bool:
        return get_origin(self.field.annotation) is tuple

    @property
    def is_switch(self) -> bool:
        """Whether its flag takes no value, and turns the default round."""
        return self.field.annotation is bool

    @property
    def is_secret(self) -> bool:
        return "SecretStr" in repr(self.field.annotation)

    @property
    def adapter(self) -> TypeAdapter[Any]:
        kind: Any = self.field.annotation
        for constraint in self.field.metadata:
            kind = Annotated[kind, constraint]
        return TypeAdapter(kind)

    @property
    def _extra(self) -> dict[str, Any]:
        extra = self.field.json_schema_extra
        assert isinstance(extra, dict)
        return extra


def all_keys() -> tuple[Key, ...]:
    """Every key, in the order of the schema."""
    keys: list[Key] = []
    for section, field in Settings.model_fields.items():
        model = field.annotation
        assert isinstance(model, type)
        assert issubclass(model, Section)
        keys.extend(Key(section, name, info) for name, info in model.model_fields.items())
    return tuple(keys)
