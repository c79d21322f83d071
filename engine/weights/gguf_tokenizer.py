"""The tokenizer in a GGUF's metadata, written as Hugging Face's `tokenizer.json` and its companions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engine.errors import WeightsError

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4


def _byte_level() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _pre_tokenizer(name: str) -> pre_tokenizers.PreTokenizer:
    """How text is cut before the merges; `name` is GGUF's `tokenizer.ggml.pre`."""
    if name == "gpt-2":
        return _byte_level()
    if name == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level()])
    raise WeightsError(
        f"GGUF: tokenizer.ggml.pre is {name!r}, which is not supported; expected 'smollm' or 'gpt-2'. "
        "Use the model's own Hugging Face checkpoint instead"
    )


def build_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """A byte-level BPE tokenizer from `tokenizer.ggml.*`; WeightsError where the metadata is incomplete or of another
    kind."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise WeightsError(f"GGUF: tokenizer.ggml.model is {kind!r}, which is not supported; expected 'gpt2'")
    tokens, types, merges = (_list(metadata, f"tokenizer.ggml.{key}") for key in ("tokens", "token_type", "merges"))
    if len(types) != len(tokens):
        raise WeightsError(
            f"GGUF: tokenizer.ggml.token_type has {len(types)} entries; expected {len(tokens)}, one a token"
        )
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise WeightsError("GGUF: tokenizer.ggml.tokens has a token twice; the file is damaged")
    pairs = [_merge(line, vocabulary) for line in merges]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    tokenizer.pre_tokenizer = _pre_tokenizer(metadata.get("tokenizer.ggml.pre", "gpt-2"))
    tokenizer.decoder = decoders.ByteLevel()
    for token, token_type in zip(tokens, types, strict=True):
        if token_type == _CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif token_type == _USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, normalized=False)])
    return tokenizer


def write_tokenizer(metadata: Mapping[str, Any], folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and, where the GGUF has one, chat_template.jinja into `folder`."""
    tokenizer = build_tokenizer(metadata)
    tokens: Sequence[str] = metadata["tokenizer.ggml.tokens"]
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": bool(metadata.get("tokenizer.ggml.add_bos_token", False)),
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata["llama.context_length"],
    }
    for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        index = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if index is not None:
            config[f"{role}_token"] = _token(tokens, index, f"tokenizer.ggml.{key}_token_id")
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")
    template = metadata.get("tokenizer.chat_template")
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)


def _list(metadata: Mapping[str, Any], key: str) -> list[Any]:
    value = metadata.get(key)
    if not isinstance(value, list) or not value:
        raise WeightsError(f"GGUF: {key} is missing; a byte-level BPE tokenizer needs it")
    return value


def _merge(line: str, vocabulary: Mapping[str, int]) -> tuple[str, str]:
    left, _, right = line.partition(" ")
    if left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
        raise WeightsError(f"GGUF: the merge {line!r} is not between two tokens of the vocabulary; the file is damaged")
    return left, right


def _token(tokens: Sequence[str], index: int, key: str) -> str:
    if not 0 <= index < len(tokens):
        raise WeightsError(f"GGUF: {key} is {index}; expected an index below {len(tokens)}")
    return tokens[index]
