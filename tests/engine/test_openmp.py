"""How torch's threads wait is chosen before torch is there, and a user's own choice stays."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from engine.openmp import SPIN_COUNT, choose_waiting, describe_waiting, threads_spin
from tests.waiting import PATIENCE_SECONDS

CLEAN = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}


def libgomp_says(code, **environment):
    """What the library shows of itself when it is loaded."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**CLEAN, "OMP_DISPLAY_ENV": "verbose", **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=True,
    )
    return done.stderr


@pytest.mark.parametrize(("can_see", "turns"), [(True, "300000"), (False, str(SPIN_COUNT))])
def test_the_library_takes_what_a_command_chose_before_torch_was_loaded(can_see, turns):
    said = libgomp_says(
        f"import sys, engine.openmp; engine.openmp.can_see_waiting = lambda: {can_see}\n"
        "from server import cli; cli.run = lambda _: __import__('torch') and 0\n"
        "try: cli.main()\nexcept SystemExit: pass"
    )
    assert f"GOMP_SPINCOUNT = '{turns}'" in said


def forget_choices(monkeypatch):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "")  # so that it is put back as it was, whatever is set meanwhile
        monkeypatch.delenv(name)


@pytest.fixture
def without_torch(monkeypatch):
    """As in a process that has not loaded it, where nobody has chosen."""
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    forget_choices(monkeypatch)


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("OMP_WAIT_POLICY", "active", "OMP_WAIT_POLICY=active"),
        ("GOMP_SPINCOUNT", "7", "they spin for 7 turns, then sleep (set by GOMP_SPINCOUNT)"),
        ("OMP_NUM_THREADS", "1", "(chosen here)"),
    ],
)
def test_a_users_own_choice_stays(without_torch, monkeypatch, variable, value, said):
    monkeypatch.setattr("engine.openmp.can_see_waiting", lambda: False)
    monkeypatch.setenv(variable, value)
    choose_waiting()
    assert os.environ[variable] == value
    assert said in describe_waiting()
    assert not threads_spin()


@pytest.mark.parametrize(("can_see", "said"), [(True, "are fewer while"), (False, "(chosen here)")])
def test_threads_sleep_at_once_only_where_nobody_sees_them_wait(without_torch, monkeypatch, can_see, said):
    monkeypatch.setattr("engine.openmp.can_see_waiting", lambda: can_see)
    choose_waiting()
    assert threads_spin() is can_see
    assert said in describe_waiting()


def test_once_torch_is_loaded_nothing_is_pretended(monkeypatch):
    import torch  # noqa: F401

    monkeypatch.setattr("engine.openmp.can_see_waiting", lambda: False)
    forget_choices(monkeypatch)
    choose_waiting()
    assert "GOMP_SPINCOUNT" not in os.environ
    assert "torch was loaded before" in describe_waiting()
