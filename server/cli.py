"""The command `dalsegno`: imports next to nothing before it can be interrupted without a traceback."""

from __future__ import annotations

import sys

_INTERRUPTED = 130


def main() -> None:
    """The entry point; ends the process with one of ExitCode."""
    code = _INTERRUPTED
    try:
        from engine.openmp import choose_waiting
        from server.process_end import end_process
        from server.stdio import occupy_descriptors

        choose_waiting()
        occupy_descriptors()
        code = run(sys.argv[1:])
        if "torch" in sys.modules:
            end_process(code)
    except KeyboardInterrupt:
        pass
    sys.exit(code)


def run(arguments: list[str]) -> int:
    """Run a command line; Ctrl-C is no failure to tell about, however early it comes."""
    try:
        from server.verbs import run_verb

        return run_verb(arguments)
    except KeyboardInterrupt:
        return _INTERRUPTED
