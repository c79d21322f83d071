"""A GGUF becomes the Hugging Face checkpoint that it was made from, or says what is wrong with it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.errors import WeightsError
from engine.weights.gguf_import import import_gguf

PROMPT = torch.tensor([[1, 40, 41, 42, 43, 44, 45, 46, 200, 201, 5, 6, 7]])


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": False},
        {"attention_bias": True, "mlp_bias": True},
        {"head_dim": 32},
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}},
    ],
    ids=["tied", "untied", "biases", "wide heads", "linear rope"],
)
def test_logits_are_those_of_the_model_that_the_gguf_was_made_from(changes, tiny_gguf, make_tiny_llama, tmp_path):
    model = make_tiny_llama(**changes)
    source = tiny_gguf(model)
    if "head_dim" in changes:
        source.metadata |= {"llama.attention.key_length": 32, "llama.rope.dimension_count": 32}
    if "rope_parameters" in changes:
        source.metadata |= {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}

    import_gguf(source.write(tmp_path / "tiny.gguf"), tmp_path / "out", dtype=torch.float32)

    imported = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    with torch.no_grad():
        torch.testing.assert_close(imported(PROMPT).logits, model(PROMPT).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_a_quantised_matrix_becomes_its_dequantised_values(kind, tiny_gguf, make_tiny_llama, tmp_path):
    quantization = GGMLQuantizationType[kind]
    source = tiny_gguf(make_tiny_llama(), quantization)

    import_gguf(source.write(tmp_path / "tiny.gguf"), tmp_path / "out", dtype=torch.float32)

    imported = load_file(tmp_path / "out" / "model.safetensors")["model.layers.1.mlp.down_proj.weight"]
    expected = dequantize(quantize(source.tensors["blk.1.ffn_down.weight"], quantization), quantization)
    np.testing.assert_array_equal(imported.numpy(), expected)


def test_weights_are_stored_as_bfloat16_unless_told_otherwise(tiny_gguf, make_tiny_llama, tmp_path):
    import_gguf(tiny_gguf(make_tiny_llama()).write(tmp_path / "tiny.gguf"), tmp_path / "out")

    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"


@pytest.fixture
def imported(tiny_gguf, make_tiny_llama, tmp_path) -> Path:
    import_gguf(tiny_gguf(make_tiny_llama()).write(tmp_path / "tiny.gguf"), tmp_path / "out")
    return tmp_path / "out"


@pytest.mark.parametrize(
    "text", ["hello world", "12 and 3.14", "a\n\n\tb  c", "中文、かな", "🚀👩\u200d👧", "<|im_end|>"]
)
def test_text_survives_the_tokenizer(text, imported):
    tokenizer = Tokenizer.from_file(str(imported / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_merges_apply_in_words_and_never_across_digits(imported):
    tokens = Tokenizer.from_file(str(imported / "tokenizer.json")).encode("hello w12").tokens
    assert tokens == ["hello", "Ġw", "1", "2"]


def test_a_gpt2_tokenizer_keeps_digits_together(tiny_gguf, make_tiny_llama, tmp_path):
    source = tiny_gguf(make_tiny_llama())
    source.metadata["tokenizer.ggml.pre"] = "gpt-2"
    import_gguf(source.write(tmp_path / "tiny.gguf"), tmp_path / "out")
    assert Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json")).encode("w12").tokens == ["w", "12"]


def test_transformers_reads_special_tokens_and_template(imported):
    tokenizer = AutoTokenizer.from_pretrained(imported)
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
    assert prompt == "<|im_start|>user\nhello<|im_end|>\n"
    assert tokenizer.encode(prompt)[0] == 1
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")


def test_the_end_token_is_in_the_generation_config(imported):
    assert json.loads((imported / "generation_config.json").read_text())["eos_token_id"] == 2


@pytest.mark.parametrize("kept_share", [0.0, 0.001, 0.01, 0.1, 0.5, 0.99])
def test_a_truncated_file_is_refused_by_name(kept_share, tiny_gguf, make_tiny_llama, tmp_path):
    path = tiny_gguf(make_tiny_llama()).write(tmp_path / "tiny.gguf")
    contents = path.read_bytes()
    path.write_bytes(contents[: int(len(contents) * kept_share)])
    with pytest.raises(WeightsError, match=r"tiny\.gguf.*(truncated|not a GGUF file)"):
        import_gguf(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_another_kind_of_file_is_refused(tmp_path):
    path = tmp_path / "weights.bin"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(WeightsError, match=r"not a GGUF file: it starts with b'PK"):
        import_gguf(path, tmp_path / "out")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("llama.expert_count", 8, "llama.expert_count is set"),
        ("llama.rope.dimension_count", 8, "llama.rope.dimension_count is 8; expected the head's 16"),
        ("llama.rope.scaling.type", "yarn", "llama.rope.scaling.type is 'yarn', which is not supported"),
        ("llama.block_count", None, "llama.block_count is missing"),
        ("llama.block_count", 3, r"tensors are missing, blk\.2\.attn_k\.weight among them"),
        ("llama.block_count", 1, r"not part of a llama model, blk\.1\.attn_k\.weight among them"),
        ("llama.feed_forward_length", 80, r"blk\.0\.ffn_gate\.weight has shape \[96, 64\]; expected \[80, 64\]"),
        ("tokenizer.ggml.model", "llama", "tokenizer.ggml.model is 'llama', which is not supported; expected 'gpt2'"),
        ("tokenizer.ggml.pre", "klingon", "tokenizer.ggml.pre is 'klingon', which is not supported"),
        ("tokenizer.ggml.merges", None, "tokenizer.ggml.merges is missing"),
        ("tokenizer.ggml.merges", ["h 中"], "the merge 'h 中' is not between two tokens"),
        ("tokenizer.ggml.token_type", [1, 1], "tokenizer.ggml.token_type has 2 entries"),
        ("tokenizer.ggml.eos_token_id", 9999, "tokenizer.ggml.eos_token_id is 9999"),
    ],
)
def test_metadata_that_does_not_fit_is_named(key, value, message, tiny_gguf, make_tiny_llama, tmp_path):
    source = tiny_gguf(make_tiny_llama())
    source.metadata[key] = value
    with pytest.raises(WeightsError, match=message):
        import_gguf(source.write(tmp_path / "tiny.gguf"), tmp_path / "out")


def test_another_architecture_is_refused_by_its_name(tiny_gguf, make_tiny_llama, tmp_path):
    source = tiny_gguf(make_tiny_llama(), architecture="gemma3")
    with pytest.raises(WeightsError, match=r"general\.architecture is 'gemma3', which is not supported"):
        import_gguf(source.write(tmp_path / "tiny.gguf"), tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        (
            "blk.0.attn_q.weight",
            np.zeros((64, 64), np.int8),
            "is of type I8, which cannot be dequantised",
        ),
        ("blk.0.strange.weight", np.zeros(4, np.float32), "not part of a llama model, blk.0.strange.weight among them"),
        ("rope_freqs.weight", np.ones(8, np.float32), "rope_freqs.weight holds frequencies scaled beforehand"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(name, tensor, message, tiny_gguf, make_tiny_llama, tmp_path):
    source = tiny_gguf(make_tiny_llama())
    source.tensors[name] = tensor
    with pytest.raises(WeightsError, match=message):
        import_gguf(source.write(tmp_path / "tiny.gguf"), tmp_path / "out")
