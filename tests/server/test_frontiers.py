"""Where a rendered conversation is likely to be resumed."""

import pytest

from cache import CheckpointKind
from engine.catalog import resolve_model
from engine.text.chat_template import ChatTemplate
from engine.text.slices import in_one_go
from engine.text.tokenizer import Tokenizer
from server.frontiers import marked_places

CLOSURE, STABLE = CheckpointKind.PRIVATE_TURN_CLOSURE, CheckpointKind.SHARED_STABLE_PREFIX
PLAIN = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
NEEDS_A_USER = "{% if messages[-1].role != 'user' %}{{ raise_exception('no user') }}{% endif %}"
SYSTEM, USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}


def texts(template: str, messages) -> dict[str, CheckpointKind]:
    compiled = ChatTemplate({"default": template})
    text = compiled.render(messages)
    return {text[:place]: kind for place, kind in in_one_go(marked_places(compiled, text, messages, {})).items()}


@pytest.mark.parametrize(
    ("template", "messages", "expected"),
    [
        (PLAIN, [USER], {"<user>Hi</>": CLOSURE}),
        (PLAIN, [SYSTEM, USER], {"<system>Be brief.</><user>Hi</>": CLOSURE, "<system>Be brief.</>": STABLE}),
        (
            PLAIN,
            [SYSTEM, SYSTEM, USER],
            {"<system>Be brief.</>" * 2 + "<user>Hi</>": CLOSURE, "<system>Be brief.</>" * 2: STABLE},
        ),
        (PLAIN, [SYSTEM], {"<system>Be brief.</>": STABLE}),
        (
            NEEDS_A_USER + PLAIN,
            [SYSTEM, USER],
            {"<system>Be brief.</><user>Hi</>": CLOSURE, "<system>Be brief.</><user>": STABLE},
        ),
        (PLAIN.replace("{% if add_generation_prompt %}<assistant>{% endif %}", ""), [USER], {}),
        ("{{ add_generation_prompt }}" + PLAIN, [SYSTEM, USER], {}),
    ],
)
def test_places_are_what_stays_of_a_prompt(template, messages, expected):
    assert texts(template, messages) == expected


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.load(resolve_model("demo"))


@pytest.mark.parametrize("content", ["Hi", "é \U0001f600 漢字", " spaces  and\n\nlines ", "<|im_end|>", "a" * 500])
def test_marks_count_tokens_and_change_none(tokenizer, content):
    before, after = f"<|im_start|>user\n{content}<|im_end|>\n", "<|im_start|>assistant\n"
    encoded = in_one_go(tokenizer.text_encoder.encode(before + after))
    assert encoded.token_ids == tokenizer.encode(before + after)
    assert encoded.token_ids[: encoded.tokens_before(len(before))] == tokenizer.encode(before)


def test_a_mark_inside_a_token_counts_nothing(tokenizer):
    assert len(tokenizer.encode("the")) == 1
    assert in_one_go(tokenizer.text_encoder.encode("the")).tokens_before(1) is None
