"""A tiny random hybrid model in Hugging Face layout, with a tokenizer of bytes: real, and loaded in a moment."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MAX_CONTEXT = 65536
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{%- if message.role == 'system' and not loop.first %}"
    "{{- raise_exception('the system message must be the first') }}{% endif %}"
    "{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endfor %}"
    "{{- '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined %}"
    "{{- '<think>\n' if enable_thinking else '<think>\n\n</think>\n\n' }}{% endif %}"
)


def write_tiny_model(folder: Path, **changes: Any) -> Path:
    """Write the model to `folder`; `changes` go into its config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _byte_tokenizer()
    config = Qwen3_5TextConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        max_position_embeddings=MAX_CONTEXT,
        tie_word_embeddings=False,
        eos_token_id=SPECIAL_TOKENS.index("<|im_end|>"),
        dtype="float32",
    )
    torch.manual_seed(11)
    model = Qwen3_5ForCausalLM(config).eval()
    with torch.no_grad():
        # Only letters are likely, so that an answer is text and does not end by itself.
        letters = [tokenizer.token_to_id(letter) for letter in string.ascii_letters]
        model.get_input_embeddings().weight.normal_()
        head = model.get_output_embeddings().weight.zero_()
        head[letters] = 10 * torch.randn(len(letters), head.shape[1])
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|im_end|>", "chat_template": CHAT_TEMPLATE}), encoding="utf-8"
    )
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes), encoding="utf-8")
    return folder


def _byte_tokenizer() -> Tokenizer:
    vocabulary = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(vocabulary)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer
