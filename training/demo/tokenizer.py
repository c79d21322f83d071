"""The byte-level BPE of the bundled model: trained on the corpus itself, digits one by one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from training.demo.config import SPECIAL_TOKENS, VOCAB_SIZE
from training.demo.corpus.documents import document
from training.demo.template import BUNDLE, render

CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Left out of decoded text. The tags of thinking and of tool calls stay in, because parsers look for them."""
TRAINING_DOCUMENTS = 30_000


def _texts(seed: int) -> Iterator[str]:
    for index in range(TRAINING_DOCUMENTS):
        made = document(seed, index)
        yield render(made.messages, made.tools)


def train_tokenizer(seed: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            # A line break is a token of its own, so that a prompt cut after one is tokenised like the whole text.
            pre_tokenizers.Split("\n", behavior="isolated"),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=4,
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(seed), trainer=trainer)
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """`tokenizer.json`, `tokenizer_config.json` and `special_tokens_map.json` in Hugging Face layout."""
    folder.mkdir(parents=True, exist_ok=True)
    described = json.loads(tokenizer.to_str())
    for token in described["added_tokens"]:
        token["special"] = token["content"] in CONTROL_TOKENS
    (folder / "tokenizer.json").write_text(json.dumps(described, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    special = {
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
    }
    added = {
        str(tokenizer.token_to_id(token)): {
            "content": token,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": token in CONTROL_TOKENS,
        }
        for token in SPECIAL_TOKENS
    }
    config = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": added,
        "chat_template": (BUNDLE / "chat_template.jinja").read_text(encoding="utf-8"),
        "clean_up_tokenization_spaces": False,
        "model_max_length": 16384,
        "tokenizer_class": "PreTrainedTokenizerFast",
        **special,
    }
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    (folder / "special_tokens_map.json").write_text(json.dumps(special, indent=2) + "\n", encoding="utf-8")


def load_tokenizer(folder: Path = BUNDLE) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def token_id(tokenizer: Tokenizer, token: str) -> int:
    found: int | None = tokenizer.token_to_id(token)
    if found is None:
        raise ValueError(f"the tokenizer has no token {token!r}; train it again")
    return found
