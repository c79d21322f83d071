"""The most that a body may hold: bytes, values, depth and messages, so that no single look at it takes long."""

from __future__ import annotations

from dataclasses import dataclass

from server.settings import ServerSettings

MAX_DEPTH = 64
"""Arrays and objects inside each other."""

MAX_CONTAINERS = 2**15
"""Arrays and objects in all; each costs the schema some microseconds."""

MAX_KEYS = 256
"""Keys of the outermost object, which is looked through name by name."""

MAX_STRINGS = 2**17
"""Strings in all, keys included."""

_LEAST_BYTES = 2**20
_BYTES_PER_TOKEN = 16
"""Of JSON, names and escapes included; few tokens of a real prompt have more."""

_LEAST_VALUES = 2**17


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """What a daemon with this context takes. `max_values`: elements of arrays and fields of objects in all."""

    max_bytes: int
    max_values: int
    max_messages: int

    @classmethod
    def of(cls, settings: ServerSettings, max_context_tokens: int = 0) -> BodyLimits:
        """Without a setting a body may have what fills the context, and a MiB for all that is no prompt."""
        wanted = settings.max_body_mib
        return cls(
            max_bytes=_LEAST_BYTES + _BYTES_PER_TOKEN * max_context_tokens if wanted == "auto" else wanted * 2**20,
            # A prompt may come as token ids, each of them a value.
            max_values=_LEAST_VALUES + max_context_tokens,
            max_messages=settings.max_messages,
        )
