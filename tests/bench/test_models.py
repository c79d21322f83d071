"""The model benchmark compares like with like, and says what it measured."""

from __future__ import annotations

import json

import pytest
import torch

from bench import models
from bench.contenders import Dalsegno, Transformers
from tests.engine.models.cases import MAIN
from tests.engine.models.driver import make_twin


@pytest.mark.parametrize("name", MAIN)
def test_both_contenders_generate_the_same_tokens(tmp_path, name):
    make_twin(MAIN[name](), tmp_path, dtype=torch.bfloat16)
    tokens = []
    for contender in (Dalsegno(tmp_path), Transformers(tmp_path)):
        contender.start_decode(batch=3, context_tokens=70, steps=8)
        contender.decode(8)
        tokens.append(contender.tokens.flatten().tolist())
    assert tokens[0] == tokens[1]


def test_every_workload_has_its_rates_and_ratios(tmp_path, monkeypatch):
    make_twin(MAIN["llama"](), tmp_path / "tiny")
    monkeypatch.setattr(models, "PREFILL_TOKENS", (20,))
    monkeypatch.setattr(models, "DECODE_CONTEXT_TOKENS", 20)
    monkeypatch.setattr(models, "STEPS_IN_A_ROUND", 2)
    threads = torch.get_num_threads()
    try:
        arguments = [str(tmp_path / "tiny"), "--rounds", "3", "--threads", "1", "--json", str(tmp_path / "out.json")]
        assert models.main(arguments) == 0
    finally:
        torch.set_num_threads(threads)
    report = json.loads((tmp_path / "out.json").read_text())
    assert [result["workload"] for result in report["results"]] == ["prefill 20", "decode, batch 1", "decode, batch 8"]
    for result in report["results"]:
        assert result["rounds"] == 3
        assert 0 < result["ratio_min"] <= result["ratio"] <= result["ratio_max"]
        assert result["dalsegno_tokens_per_second"] > 0


def test_a_model_that_is_not_there_is_an_error_and_no_traceback(tmp_path, capsys):
    assert models.main([str(tmp_path / "nothing")]) == 3
    assert "error: " in capsys.readouterr().err
