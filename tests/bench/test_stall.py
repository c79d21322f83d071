"""A long prompt beside running streams gives one line with the longest gap."""

from __future__ import annotations

import re

from bench import stall
from tests.server.tiny_model import write_tiny_model


def test_the_gap_is_told_in_segments(tmp_path, capsys):
    assert stall.main([str(write_tiny_model(tmp_path / "tiny")), "--prompt-tokens", "1500"]) == 0
    assert re.search(r"a prompt of 1,500 tokens: longest gap \d+ ms, \d+\.\d+ of a segment", capsys.readouterr().out)
