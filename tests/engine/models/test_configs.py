"""config.json of every architecture: what is read, and what is refused by its field's name."""

from __future__ import annotations

import json

import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine.errors import ModelLoadError, UnsupportedConfigError
from engine.models import llama, qwen3, qwen3_5
from engine.models.config import LayerKind
from engine.models.registry import read_config
from engine.models.rope import inverse_frequencies_of
from tests.engine.models import cases

LINEAR, FULL = LayerKind.LINEAR_ATTENTION, LayerKind.FULL_ATTENTION


def write(folder, config, generation=None):
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def qwen3_5_raw(**changes):
    return {**cases.qwen3_5().to_dict(), **changes}


def test_an_empty_config_has_the_defaults_of_transformers(tmp_path):
    import transformers

    for model_type, config in (
        ("llama", transformers.LlamaConfig()),
        ("qwen3", transformers.Qwen3Config()),
        ("qwen3_5_text", transformers.Qwen3_5TextConfig()),
    ):
        short = read_config(write(tmp_path, {"model_type": model_type, "eos_token_id": config.eos_token_id}))
        assert short == read_config(write(tmp_path, config.to_dict())), model_type


def test_layer_kinds_come_from_the_interval_or_the_list():
    raw = qwen3_5_raw(num_hidden_layers=6)
    by_interval = {key: value for key, value in raw.items() if key != "layer_types"} | {"full_attention_interval": 3}
    assert qwen3_5.parse_config(by_interval).layer_kinds == (LINEAR, LINEAR, FULL) * 2
    listed = {**raw, "layer_types": ["full_attention"] + ["linear_attention"] * 5}
    assert qwen3_5.parse_config(listed).layer_kinds == (FULL, *[LINEAR] * 5)


def test_a_full_model_is_read_from_its_text_config():
    raw = cases.qwen3_5_full(head_dim=64).to_dict()
    raw["tie_word_embeddings"] = True
    config = qwen3_5.parse_config(raw)
    assert (config.attention.head_dim, config.has_tied_embeddings) == (64, True)


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({"eos_token_id": 5}, None, (5,)),
        ({"eos_token_id": [5, 6]}, None, (5, 6)),
        ({"eos_token_id": 5}, {"eos_token_id": [7, 8]}, (7, 8)),
        ({"eos_token_id": 5}, {"temperature": 1}, (5,)),
        ({"eos_token_id": None}, None, ()),
    ],
)
def test_end_tokens_are_those_of_generation_config_where_it_has_any(tmp_path, config, generation, expected):
    raw = {**cases.llama().to_dict(), **config}
    assert read_config(write(tmp_path, raw, generation)).eos_token_ids == expected


def test_end_tokens_of_a_full_model_may_be_in_its_text_config(tmp_path):
    raw = cases.qwen3_5_full().to_dict()
    raw["text_config"]["eos_token_id"] = 9
    assert read_config(write(tmp_path, raw)).eos_token_ids == (9,)


REFUSED = [
    (llama, cases.llama, {"hidden_act": "gelu"}, "hidden_act"),
    (llama, cases.llama, {"sliding_window": 128}, "sliding_window"),
    (llama, cases.llama, {"num_key_value_heads": 3}, "num_key_value_heads"),
    (llama, cases.llama, {"num_local_experts": 8}, "num_local_experts"),
    (llama, cases.llama, {"hidden_size": "64"}, "hidden_size"),
    (llama, cases.llama, {"num_hidden_layers": 0}, "num_hidden_layers"),
    (llama, cases.llama, {"rms_norm_eps": None, "tie_word_embeddings": "no"}, "tie_word_embeddings"),
    (llama, cases.llama, {"partial_rotary_factor": 0.5, "rope_parameters": None}, "partial_rotary_factor"),
    (llama, cases.llama, {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_parameters.rope_type"),
    (llama, cases.llama, {"rope_parameters": {"rope_type": "linear"}}, "rope_parameters.factor"),
    (llama, cases.llama, {"rope_parameters": {"full_attention": {}}}, "rope_parameters"),
    (llama, cases.llama, {"rope_scaling": {"type": "longrope"}}, "rope_scaling.rope_type"),
    (llama, cases.llama, {"eos_token_id": "x"}, "eos_token_id"),
    (qwen3, cases.qwen3, {"layer_types": ["sliding_attention"] * 4}, "layer_types"),
    (
        qwen3,
        cases.qwen3,
        {"layer_types": None, "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2},
        "use_sliding_window",
    ),
    (qwen3, cases.qwen3, {"num_experts": 4}, "num_experts"),
    (qwen3_5, cases.qwen3_5, {"layer_types": ["mamba"] * 4}, "layer_types"),
    (qwen3_5, cases.qwen3_5, {"layer_types": ["full_attention"]}, "layer_types"),
    (qwen3_5, cases.qwen3_5, {"linear_num_value_heads": 3}, "linear_num_value_heads"),
    (qwen3_5, cases.qwen3_5, {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim"),
    (qwen3_5, cases.qwen3_5, {"attn_output_gate": False}, "attn_output_gate"),
    (qwen3_5, cases.qwen3_5, {"hidden_act": "relu"}, "hidden_act"),
    (qwen3_5, cases.qwen3_5, {"output_gate_type": "sigmoid"}, "output_gate_type"),
    (qwen3_5, cases.qwen3_5, {"attn_logit_softcap": 30.0}, "attn_logit_softcap"),
    (qwen3_5, cases.qwen3_5, {"use_sliding_window": True}, "use_sliding_window"),
    (
        qwen3_5,
        cases.qwen3_5,
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "rope_offset": 2}},
        "rope_parameters.rope_offset",
    ),
    (qwen3_5, cases.qwen3_5_full, {"hidden_size": 128}, "hidden_size"),
    (qwen3_5, cases.qwen3_5_full, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling"),
]


@pytest.mark.parametrize(("architecture", "config", "changes", "field"), REFUSED)
def test_an_unsupported_value_is_refused_by_its_field(architecture, config, changes, field):
    with pytest.raises(UnsupportedConfigError) as refusal:
        architecture.parse_config({**config().to_dict(), **changes})
    assert refusal.value.field == field


def test_a_refusal_in_a_nested_config_names_the_whole_path():
    raw = cases.qwen3_5_full().to_dict()
    raw["text_config"]["hidden_act"] = "gelu"
    with pytest.raises(UnsupportedConfigError, match=r"text_config\.hidden_act is 'gelu'"):
        qwen3_5.parse_config(raw)


def test_a_sliding_window_that_no_layer_uses_is_fine():
    raw = {**cases.qwen3().to_dict(), "layer_types": None, "use_sliding_window": True, "sliding_window": 64}
    assert qwen3.parse_config({**raw, "max_window_layers": 4}).num_layers == 4
    assert qwen3.parse_config({**raw, "use_sliding_window": False, "max_window_layers": 0}).num_layers == 4


# The fields that configs of Qwen3.5, 3.6 and 3.8 have beside those of transformers' own class.
PUBLISHED_FIELDS = {
    "attn_output_gate": True,
    "attn_logit_softcap": None,
    "full_attention_interval": 4,
    "mamba_ssm_dtype": "float32",
    "mlp_only_layers": [],
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "output_gate_type": "swish",
    "partial_rotary_factor": 0.25,
}


def test_the_fields_of_published_configs_change_nothing(tmp_path):
    plain = cases.qwen3_5_full().to_dict()
    published = {**plain, "language_model_only": False, "hidden_size": 64, "eos_token_id": None}
    published["text_config"] = {**plain["text_config"], **PUBLISHED_FIELDS}
    assert qwen3_5.parse_config(published) == qwen3_5.parse_config(plain)


@pytest.mark.parametrize(
    ("model_type", "what"),
    [
        ("qwen3_moe", "experts"),
        ("qwen3_5_moe", "experts"),
        ("qwen3_5_moe_text", "experts"),
        ("qwen3_next", "fused Gated DeltaNet projections"),
        ("qwen4_exp", "sparse attention"),
    ],
)
def test_a_relative_that_is_not_built_says_what_it_has_that_is_not(tmp_path, model_type, what):
    message = rf"{model_type}.* llama, qwen3, qwen3_5, qwen3_5_text, which are dense; .*{what}.* are not built"
    with pytest.raises(UnsupportedConfigError, match=message):
        read_config(write(tmp_path, {"model_type": model_type, "num_experts": 8}))


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3_5_moe", "mamba", None, 3])
def test_an_unknown_architecture_lists_the_supported_ones(tmp_path, model_type):
    with pytest.raises(UnsupportedConfigError, match=r"model_type is .*llama, qwen3, qwen3_5"):
        read_config(write(tmp_path, {"model_type": model_type}))


def test_a_folder_without_config_says_so(tmp_path):
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        read_config(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[1]", "\x00"])
def test_a_broken_config_names_its_file(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        read_config(tmp_path)


YARN = cases.YARN_ROPE
ROPES = [
    {"rope_type": "linear", "rope_theta": 5000.0, "factor": 3.0},
    cases.LLAMA3_ROPE,
    YARN,
    {**YARN, "factor": 1.0},
    {**YARN, "attention_factor": 1.3},
    {**YARN, "beta_fast": 8, "beta_slow": 2},
    {**YARN, "truncate": False},
    {**YARN, "mscale": 0.7, "mscale_all_dim": 1.1},
    {key: value for key, value in YARN.items() if key != "original_max_position_embeddings"},
]


@pytest.mark.parametrize("is_old_style", [True, False])
@pytest.mark.parametrize("rope", ROPES)
def test_frequencies_are_those_of_transformers(rope, is_old_style):
    theirs = cases.llama(head_dim=64, rope_parameters=dict(rope))
    frequencies, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](theirs, "cpu")
    raw = theirs.to_dict()
    del raw["rope_parameters"]
    if is_old_style:
        raw["rope_theta"] = rope["rope_theta"]
        raw["rope_scaling"] = {key: value for key, value in rope.items() if key != "rope_theta"}
        raw["rope_scaling"]["type"] = raw["rope_scaling"].pop("rope_type")
    else:
        raw["rope_parameters"] = rope
    ours, our_factor = inverse_frequencies_of(llama.parse_config(raw).rope)
    torch.testing.assert_close(ours, frequencies, rtol=1e-6, atol=0)
    assert our_factor == pytest.approx(factor)
