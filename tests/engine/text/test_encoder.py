"""Texts are encoded in slices, with the ids of the whole, and no further than the context reaches."""

import pytest

from engine.catalog import resolve_model
from engine.errors import ContextLengthExceededError
from engine.text.chat_template import ChatTemplate
from engine.text.slices import in_one_go
from engine.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.load(resolve_model("demo"))
TEMPLATE = ChatTemplate.load(resolve_model("demo"), TOKENIZER.control_tokens)
ENCODER = TOKENIZER.chat_encoder(TEMPLATE.stand_ins)
LONG = [
    {"role": role, "content": f"The {number}th ship brought salt, timber and 12 lamps. " * 40}
    for number in range(40)
    for role in ("user", "assistant")
]


def slices(work) -> int:
    count = 1
    try:
        while True:
            next(work)
            count += 1
    except (StopIteration, ContextLengthExceededError):
        return count


def test_a_long_conversation_comes_in_slices_with_the_ids_of_the_whole():
    text = in_one_go(TEMPLATE.write(LONG))
    assert slices(ENCODER.encode(text)) > 3
    encoded = in_one_go(ENCODER.encode(text))
    assert encoded.token_ids == TOKENIZER.encode(TEMPLATE.render(LONG))
    for count in range(1, len(LONG), 8):
        before = in_one_go(TEMPLATE.write(LONG[:count], add_generation_prompt=False))
        assert encoded.tokens_before(len(before)) == len(in_one_go(ENCODER.encode(before)).token_ids)


def test_encoding_ends_with_the_slice_that_passes_the_context():
    text = in_one_go(TEMPLATE.write(LONG))
    with pytest.raises(ContextLengthExceededError, match="your prompt has at least"):
        in_one_go(ENCODER.encode(text, max_tokens=5000))
    assert slices(ENCODER.encode(text, max_tokens=5000)) <= 3 < slices(ENCODER.encode(text))


@pytest.mark.parametrize(
    "text", ["0123456789" * 10_000, "the quick brown fox. " * 8_000, "a" * 100_000], ids=["digits", "words", "one word"]
)
def test_a_text_that_is_far_too_long_is_encoded_in_part(text):
    with pytest.raises(ContextLengthExceededError) as refused:
        in_one_go(TOKENIZER.text_encoder.encode(text, max_tokens=4_096))
    counted = int(str(refused.value).split("at least ")[1].split()[0])
    assert 4_096 <= counted < len(TOKENIZER.encode(text)) / 2


@pytest.mark.parametrize(
    "text", [" " * 100_000, "a" * 100_000, "word " * 15_000, "\n" * 30_000, "<|im_end|>" * 9_000], ids=len
)
def test_a_text_that_fits_is_never_refused(text):
    token_ids = TOKENIZER.encode(text)
    for room in (1, 1000):
        encoded = in_one_go(TOKENIZER.text_encoder.encode(text, max_tokens=len(token_ids) + room))
        assert encoded.token_ids == token_ids
