"""What `dalsegno doctor` reports: one line for each thing that it looked at."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from server.exit_codes import ExitCode


class Verdict(StrEnum):
    """How a finding stands; only BAD would stop `serve`."""

    OK = "ok"
    NOTE = "note"
    BAD = "bad"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. `advice` says what to do, or why it is as it is; empty where nothing is to be said."""

    subject: str
    verdict: Verdict
    what: str
    advice: str = ""
    exit_code: ExitCode = ExitCode.OK
