"""The version that is installed."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def package_version() -> str:
    """The installed version, or that of a tree which was never installed."""
    try:
        return version("dalsegno")
    except PackageNotFoundError:
        return "0.0.0"
