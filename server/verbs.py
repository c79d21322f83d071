"""The verbs of `dalsegno`, and how every failure becomes one line and an exit code."""

from __future__ import annotations

import logging
import sys
from typing import Annotated

import typer

from engine.errors import EngineError
from server.commands import (
    bench,
    chat,
    completion,
    config,
    doctor,
    drill,
    generate,
    inspect,
    models,
    pull,
    quantize,
    replay,
    serve,
    watch,
)
from server.commands.foreign_flags import HINTS
from server.configuration import ConfigurationError
from server.exit_codes import ExitCode, exit_code_of
from server.listener import PortTakenError
from server.settings import NOT_BUILT_FLAGS
from server.stdio import silence_output
from server.version import package_version

app = typer.Typer(
    name=completion.PROGRAM,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        print(f"dalsegno {package_version()}")
        raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """An OpenAI-compatible serving daemon for hybrid language models."""


app.command("serve")(serve.serve)
app.command("chat")(chat.chat)
app.command("generate")(generate.generate)
app.command("pull")(pull.pull)
app.command("list")(models.list_models)
app.command("rm")(models.rm)
app.command("quantize")(quantize.quantize)
app.command("inspect")(inspect.inspect)
app.command("bench")(bench.bench)
app.command("replay")(replay.replay)
app.command("watch")(watch.watch)
app.add_typer(drill.app, name="drill")
app.command("doctor")(doctor.doctor)
app.command("config")(config.config)
app.command("completion")(completion.completion)


def run_verb(arguments: list[str]) -> int:
    """Run a command line; failures are told on standard error in one line, with a traceback at log level debug."""
    try:
        _refuse_known_flags(arguments)
        completion.prepare()
        app(arguments, prog_name=completion.PROGRAM)
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else ExitCode.OK if exit_.code is None else ExitCode.FAILED
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        silence_output()
        return ExitCode.FAILED
    except (ConfigurationError, EngineError, PortTakenError, OSError) as error:
        if logging.getLogger("dalsegno").isEnabledFor(logging.DEBUG):
            logging.getLogger("dalsegno").debug("the command failed", exc_info=error)
        print(f"dalsegno: {error}", file=sys.stderr)
        return exit_code_of(error)
    return ExitCode.OK


def _refuse_known_flags(arguments: list[str]) -> None:
    """Those of a later version, and those of other servers: with what to do, where a similar name would lead astray."""
    for argument in arguments:
        if argument == "--":
            return
        flag = argument.partition("=")[0]
        if flag in NOT_BUILT_FLAGS:
            raise ConfigurationError(f"{flag} is not built yet; leave it out")
        if flag in HINTS:
            servers, hint = HINTS[flag]
            raise ConfigurationError(f"{flag} is a flag of {servers}; {hint}")
