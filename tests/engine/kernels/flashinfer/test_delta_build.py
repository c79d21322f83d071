"""flashinfer's delta rule compiles to machine code for each architecture, called as the backend calls it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

CHUNKS = ["resumed and fresh", "one token", "captured on the grid"]
DECODES = ["decodes", "one decode"]
STEPS_OF = {
    "sm_80": CHUNKS,
    "sm_89": CHUNKS,
    "sm_90a": [*DECODES, *CHUNKS],
    "sm_100a": [*DECODES, *CHUNKS],
    "sm_103a": [*DECODES, *CHUNKS],
    "sm_120a": [*DECODES, *CHUNKS],
    "sm_121a": [*DECODES, *CHUNKS],
}


@pytest.mark.slow
@pytest.mark.parametrize("architecture", STEPS_OF)
def test_the_delta_rule_compiles_for(architecture):
    command = [sys.executable, "-W", "ignore", "-m", "tests.engine.kernels.flashinfer.delta_build", architecture]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": "."}
    steps = STEPS_OF[architecture]
    done = subprocess.run([*command, *steps], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stdout.splitlines() if line.split(":")[0] in steps]
    assert told == [f"{step}: compiled" for step in steps]
