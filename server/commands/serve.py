"""`dalsegno serve`: the daemon."""

from __future__ import annotations

from typing import Annotated

import typer

from server.commands.options import with_settings
from server.configuration import Resolved
from server.drill import plan_drill
from server.listener import listen


@with_settings("server", "engine", "cache", model="argument")
def serve(
    resolved: Resolved,
    allow_faults: Annotated[bool, typer.Option("--allow-faults", hidden=True)] = False,
    fault: Annotated[list[str] | None, typer.Option("--fault", hidden=True, metavar="NAME")] = None,
) -> None:
    """Serve a model over HTTP until SIGTERM or Ctrl-C."""
    settings = resolved.settings
    drill = plan_drill(allow_faults, fault or ())
    listener = listen(settings.server.host, settings.server.port)
    # Torch takes seconds to import: only once the port is ours.
    from server.runner import run_daemon

    run_daemon(settings, listener, drill)
