"""Loading a tokenizer, and what it says about bad files and bad text."""

import json

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from engine.errors import ModelLoadError, RequestError
from engine.text.tokenizer import Tokenizer


@pytest.fixture
def folder(tmp_path):
    vocab = {token: index for index, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    library = tokenizers.Tokenizer(models.BPE(vocab, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["<s>", "<|im_end|>"])
    library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    library.enable_truncation(4)
    library.save(str(tmp_path / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "bos_token": {"content": "<s>"}, "pad_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def test_special_tokens_in_text_are_parsed(folder):
    assert Tokenizer.load(folder).encode("a<|im_end|>") == [Tokenizer.load(folder).id_of("a"), 257]


def test_a_leading_bos_comes_only_when_asked_for(folder):
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.encode("a", add_special_tokens=True) == [256, *tokenizer.encode("a")]


def test_named_special_tokens_are_known_by_id(folder):
    tokenizer = Tokenizer.load(folder)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (256, 257)
    assert tokenizer.special_token_ids == {256, 257}
    assert tokenizer.vocab_size == 258


def test_truncation_in_the_file_is_not_applied(folder):
    assert len(Tokenizer.load(folder).encode("a" * 100)) == 100


def test_decode_gives_the_text_back(folder):
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.decode(tokenizer.encode("naïve 漢字<|im_end|>")) == "naïve 漢字"
    assert tokenizer.decode([257], skip_special_tokens=False) == "<|im_end|>"


@pytest.mark.parametrize("token_id", [-1, 2**32])
def test_decode_refuses_an_id_that_cannot_be_one(folder, token_id):
    with pytest.raises(RequestError, match=str(token_id)):
        Tokenizer.load(folder).decode([token_id])


def test_a_lone_surrogate_is_the_request_s_fault(folder):
    with pytest.raises(RequestError, match="surrogate"):
        Tokenizer.load(folder).encode("a\ud800")


@pytest.mark.parametrize("content", [None, "", "{", '{"model": 3}', "\x00"])
def test_a_missing_or_broken_tokenizer_is_named(tmp_path, content):
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_broken_tokenizer_config_is_named(folder, content):
    (folder / "tokenizer_config.json").write_text(content)
    with pytest.raises(ModelLoadError, match=r"tokenizer_config\.json"):
        Tokenizer.load(folder)
