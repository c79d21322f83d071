"""`dalsegno config`: the resolved configuration, and where each value came from."""

from __future__ import annotations

from server.commands.options import with_settings
from server.configuration import Resolved, to_toml


@with_settings("server", "engine", "cache", model="argument")
def config(resolved: Resolved) -> None:
    """Print the resolved configuration as TOML."""
    print(to_toml(resolved.settings, resolved.origins), end="")
