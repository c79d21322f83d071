"""The address of a daemon, as a person writes it."""

from __future__ import annotations


def base_url(url: str) -> str:
    """With its scheme, without what follows the port."""
    whole = url if "://" in url else f"http://{url}"
    return whole.rstrip("/").removesuffix("/v1")
