"""`dalsegno completion`: what a shell reads to complete commands, flags and names."""

from __future__ import annotations

import os
from typing import Annotated, Literal

import typer
from typer.completion import completion_init, get_completion_script  # type: ignore[attr-defined]

PROGRAM = "dalsegno"
_VARIABLE = "_DALSEGNO_COMPLETE"
"""Set by the script where the shell wants to know how a line may go on."""
_COLUMNS = "1000"
"""More than any flag's help has: a shell takes its second line for something else that can be typed."""


def completion(shell: Annotated[Literal["bash", "zsh", "fish"], typer.Argument(help="whose script")]) -> None:
    """Print a script that makes a shell complete commands, flags and the names of models.

    bash: eval "$(dalsegno completion bash)" in ~/.bashrc.

    zsh: eval "$(dalsegno completion zsh)" in ~/.zshrc, after compinit.

    fish: dalsegno completion fish > ~/.config/fish/completions/dalsegno.fish.
    """
    print(get_completion_script(prog_name=PROGRAM, complete_var=_VARIABLE, shell=shell))


def prepare() -> None:
    """Make the questions of those scripts understood, where one is asked."""
    if _VARIABLE in os.environ:
        os.environ["COLUMNS"] = _COLUMNS
        completion_init()
