"""The incremental detokenizer against a full decode by the tokenizers library."""

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from engine.errors import ModelLoadError
from engine.text.tokenizer import Tokenizer

WORDS = ["Hello", "Ġworld", "ĠĠ", "Ċ", "ðŁ", "ĺĢ", "é", "æ¼", "¢", "åŃĹ", "Ì", "ģ"]
SPECIAL = tokenizers.AddedToken("<|im_end|>", special=True)
PLAIN = tokenizers.AddedToken("<think>", special=False)
PLAIN_WITH_SPACE = tokenizers.AddedToken("a tool call▁", special=False)


def byte_level() -> Tokenizer:
    vocab = {token: index for index, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for word in WORDS:
        vocab.setdefault(word, len(vocab))
    library = tokenizers.Tokenizer(models.BPE(vocab, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_tokens([SPECIAL, PLAIN, PLAIN_WITH_SPACE])
    return Tokenizer(library, {})


def byte_fallback() -> Tokenizer:
    vocab = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    for word in ["▁", "▁Hello", "▁world", "wor", "é", "漢", "▁▁", "\n", "a"]:
        vocab.setdefault(word, len(vocab))
    library = tokenizers.Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    library.add_tokens([SPECIAL, PLAIN])
    return Tokenizer(library, {})


def metaspace() -> Tokenizer:
    vocab = {"<unk>": 0, "▁Hello": 1, "▁world": 2, "s": 3, "▁": 4, "漢": 5}
    library = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    library.decoder = decoders.Metaspace()
    return Tokenizer(library, {})


BYTE_LEVEL, BYTE_FALLBACK, METASPACE = byte_level(), byte_fallback(), metaspace()


def stream(tokenizer: Tokenizer, token_ids: list[int]) -> list[str]:
    detokenizer = tokenizer.new_detokenizer()
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.flush()]


def ids_below(size: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, size - 1), max_size=40)


@given(ids_below(BYTE_LEVEL.vocab_size))
def test_byte_level_stream_equals_full_decode_for_any_tokens(token_ids):
    assert "".join(stream(BYTE_LEVEL, token_ids)) == BYTE_LEVEL.decode(token_ids)


@given(ids_below(METASPACE.vocab_size))
def test_metaspace_stream_equals_full_decode_for_any_tokens(token_ids):
    assert "".join(stream(METASPACE, token_ids)) == METASPACE.decode(token_ids)


@given(st.text(max_size=30))
def test_byte_fallback_stream_equals_full_decode_for_valid_text(text):
    token_ids = [BYTE_FALLBACK.id_of(f"<0x{byte:02X}>") for byte in text.encode()]
    assert "".join(stream(BYTE_FALLBACK, token_ids)) == BYTE_FALLBACK.decode(token_ids)


@given(ids_below(BYTE_FALLBACK.vocab_size))
def test_byte_fallback_stream_is_the_lossy_reading_of_its_bytes(token_ids):
    """The library replaces every byte of a run that has one bad byte; the stream loses only the bad one."""
    kept = [token_id for token_id in token_ids if token_id not in BYTE_FALLBACK.special_token_ids]
    text = b"".join(map(BYTE_FALLBACK.bytes_of, kept)).decode("utf-8", "replace")
    assert "".join(stream(BYTE_FALLBACK, token_ids)) == text.removeprefix(" ")


@given(st.text(max_size=30))
def test_no_piece_of_valid_text_holds_a_broken_character(text):
    pieces = stream(BYTE_LEVEL, BYTE_LEVEL.encode(text))
    assert "".join(pieces) == text
    assert text.count("\ufffd") == sum(piece.count("\ufffd") for piece in pieces)


@pytest.mark.parametrize("text", ["👩‍👩‍👧‍👦", "e\u0301a\u0308", "漢字かな", "🇩🇪", "नमस्ते", "\U0001f600" * 5])
def test_emoji_combining_sequences_and_cjk_come_whole(text):
    pieces = stream(BYTE_LEVEL, BYTE_LEVEL.encode(text))
    assert "".join(pieces) == text
    assert all(piece in text for piece in pieces)


def test_a_character_is_held_until_its_last_byte():
    assert stream(BYTE_LEVEL, BYTE_LEVEL.encode("é")) == ["", "é", ""]


def test_an_unfinished_character_at_the_end_becomes_one_replacement_character():
    assert stream(BYTE_LEVEL, BYTE_LEVEL.encode("😀")[:3]) == ["", "", "", "\ufffd"]


def test_special_tokens_have_no_text_and_plain_added_tokens_have():
    ids = [BYTE_LEVEL.id_of(token) for token in ("<|im_end|>", "<think>", "a tool call▁")]
    assert stream(BYTE_LEVEL, ids) == ["", "<think>", "a tool call▁", ""]


def test_an_unknown_id_has_no_text():
    assert stream(BYTE_LEVEL, [10**6]) == ["", ""]


def test_an_unsupported_decoder_is_refused_by_name():
    library = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    library.decoder = decoders.WordPiece()
    with pytest.raises(ModelLoadError, match="WordPiece"):
        Tokenizer(library, {})
