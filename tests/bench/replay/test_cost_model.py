"""Presets: the one that ships, and what is said of one that is wrong."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from bench.replay.cost_model import DEFAULT_PRESET, load_preset
from engine.errors import UnusableOptionError


def _toml(values):
    return "".join(f"{key} = {value!r}\n" for key, value in values.items())


def test_the_default_is_a_27b_hybrid_whose_state_weighs_what_2352_tokens_do():
    model = load_preset(DEFAULT_PRESET)
    assert model.state_bytes == 147 << 20
    assert model.state_bytes // model.kv_bytes_per_token == 2352


def test_a_decode_step_costs_more_with_more_requests():
    model = load_preset(DEFAULT_PRESET)
    assert model.decode_seconds(0) == 0
    assert model.decode_seconds(1) == model.decode_step_seconds
    assert model.decode_seconds(4) == model.decode_step_seconds + 3 * model.decode_step_seconds_per_request


def test_a_file_is_a_preset_too(tmp_path):
    values = asdict(load_preset(DEFAULT_PRESET)) | {"title": "mine", "prefill_tokens_per_second": 5}
    (tmp_path / "mine.toml").write_text(_toml(values))
    assert load_preset(str(tmp_path / "mine.toml")).prefill_tokens_per_second == 5


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"page_tokens": "many"}, "page_tokens is 'many', expected a whole number above 0"),
        ({"page_tokens": 1.5}, "page_tokens is 1.5"),
        ({"decode_step_seconds": -1}, "decode_step_seconds is -1, expected a number above 0"),
        ({"pages": 3}, "unknown key 'pages'; known are title"),
    ],
)
def test_a_wrong_preset_is_refused_by_key(tmp_path, change, told):
    (tmp_path / "bad.toml").write_text(_toml(asdict(load_preset(DEFAULT_PRESET)) | change))
    with pytest.raises(UnusableOptionError) as error:
        load_preset(str(tmp_path / "bad.toml"))
    assert told in str(error.value)


@pytest.mark.parametrize(("text", "told"), [("title = 'x'", "is missing"), ("title", "is not TOML")])
def test_a_broken_preset_is_refused(tmp_path, text, told):
    (tmp_path / "bad.toml").write_text(text)
    with pytest.raises(UnusableOptionError, match=told):
        load_preset(str(tmp_path / "bad.toml"))


def test_an_unknown_preset_names_those_that_there_are():
    with pytest.raises(UnusableOptionError, match="neither a file nor one of 27b-hybrid"):
        load_preset("70b")
