"""Who shares remembered prompts with whom: everybody, the holders of one API key, or those who know the same salt."""

from __future__ import annotations

import secrets
from hashlib import blake2b

from starlette.types import Scope

KEY_NUMBER = "key_number"
"""In a request's state: which of the API keys it was sent with. The key itself goes no further than the boundary."""

_SECRET_BYTES = 32
_DIGEST_BYTES = 16


class Isolation:
    """Names the namespaces. Immutable.

    The names are digests under a secret of this process, so that they may stand in a log: nobody can find the salt
    behind one by trying.
    """

    def __init__(self, *, is_by_key: bool) -> None:
        self._is_by_key = is_by_key
        self._secret = secrets.token_bytes(_SECRET_BYTES)

    def client(self, scope: Scope) -> str:
        """Whose request it is, for the queue: the holder of one API key, or who sends from one address."""
        key_number, address = scope["state"].get(KEY_NUMBER), scope.get("client")
        text = f"key {key_number}" if key_number is not None else f"address {address[0] if address else ''}"
        return blake2b(text.encode(), key=self._secret, digest_size=_DIGEST_BYTES).hexdigest()

    def namespace(self, scope: Scope, cache_salt: str | None) -> str:
        """Of a request: the same only for those that may share; empty for the one that all share."""
        key_number = scope["state"].get(KEY_NUMBER) if self._is_by_key else None
        if key_number is None and cache_salt is None:
            return ""
        # The number of the key has no colon in it, so no salt can pass for another key's.
        text = f"{'' if key_number is None else key_number}:{'' if cache_salt is None else 'salt ' + cache_salt}"
        return blake2b(text.encode("utf-8", "surrogatepass"), key=self._secret, digest_size=_DIGEST_BYTES).hexdigest()
