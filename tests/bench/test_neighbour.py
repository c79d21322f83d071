"""The bench beside a busy process: every way to wait, each workload, alone and beside."""

from __future__ import annotations

import json

from bench import neighbour
from tests.engine.models.cases import MAIN
from tests.engine.models.driver import make_twin


def test_every_way_to_wait_is_measured_alone_and_beside(tmp_path, monkeypatch):
    make_twin(MAIN["llama"](), tmp_path / "tiny")
    monkeypatch.setattr(neighbour, "WAITING", {neighbour.OWN: {"OMP_NUM_THREADS": "1"}})
    arguments = [str(tmp_path / "tiny"), "--rounds", "1", "--prefill", "5", "--decode", "2"]
    assert neighbour.main([*arguments, "--json", str(tmp_path / "out.json")]) == 0
    results = json.loads((tmp_path / "out.json").read_text())
    assert [each["workload"] for each in results] == ["prefill", "decode"]
    for each in results:
        assert each["alone_to_own"] == 1.0
        assert 0 < each["beside_to_alone_min"] <= each["beside_to_alone"] <= each["beside_to_alone_max"]
