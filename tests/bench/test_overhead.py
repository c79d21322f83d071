"""The engine's own work is what a step takes beyond the kernels."""

from __future__ import annotations

import pytest

from bench import overhead
from bench.overhead import own_and_whole_seconds
from tests.server.tiny_model import write_tiny_model


def test_only_decode_steps_that_follow_on_one_another_count():
    # Tokens, seconds in the kernels, end: a prefill, three steps of two, one of one.
    steps = [(9, 5.0, 10.0), (2, 3.0, 20.0), (2, 3.0, 24.0), (2, 3.0, 28.0), (1, 1.0, 99.0)]
    assert own_and_whole_seconds(steps, 2) == pytest.approx((1.0, 4.0))


def test_every_batch_gets_its_line(tmp_path, capsys):
    assert overhead.main([str(write_tiny_model(tmp_path / "tiny")), "--steps", "16"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert ["batch 1" in lines[0], "batch 8" in lines[1], len(lines)] == [True, True, 2]
