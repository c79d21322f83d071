"""`dalsegno serve`: the daemon."""

from __future__ import annotations

from server.commands.options import with_settings
from server.configuration import Resolved
from server.listener import listen


@with_settings("server", "engine", "cache", model="argument")
def serve(resolved: Resolved) -> None:
    """Serve a model over HTTP until SIGTERM or Ctrl-C."""
    settings = resolved.settings
    listener = listen(settings.server.host, settings.server.port)
    # Torch takes seconds to import: only once the port is ours.
    from server.runner import run_daemon

    run_daemon(settings, listener)
