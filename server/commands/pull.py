"""`dalsegno pull`: fetch a model before it is needed."""

from __future__ import annotations

from typing import Annotated

import typer

from server.commands.options import with_settings
from server.configuration import Resolved


@with_settings()
def pull(
    _resolved: Resolved,
    name: Annotated[str, typer.Argument(help="a short name (smollm2) or a hub id", metavar="NAME")],
    force: Annotated[bool, typer.Option("--force", help="fetch and make it anew")] = False,
    nvfp4: Annotated[bool, typer.Option("--nvfp4", help="make its NVFP4 version as well")] = False,
) -> None:
    """Fetch a model; what is there and sound is not fetched again."""
    from engine.catalog import pull as fetch

    print(fetch(name, force=force, nvfp4=nvfp4))
