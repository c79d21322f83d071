"""The chat template: transformers agrees, earlier turns never change, thinking leaves the history."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
from jinja2.exceptions import TemplateError
from transformers import AutoTokenizer

from training.demo.corpus.documents import document
from training.demo.template import BUNDLE, render
from training.demo.tokenizer import load_tokenizer

Message = dict[str, Any]


def _documents(count: int) -> list[tuple[list[Message], list[Message]]]:
    return [(made.messages, made.tools) for made in (document(5, index) for index in range(count))]


def test_transformers_renders_the_same() -> None:
    tokenizer = AutoTokenizer.from_pretrained(BUNDLE)
    for messages, tools in _documents(150):
        theirs = tokenizer.apply_chat_template(
            messages, tools=tools or None, tokenize=False, add_generation_prompt=True
        )
        assert theirs == render(messages, tools, add_generation_prompt=True)


def test_turn_closure_is_a_prefix_of_every_longer_chat() -> None:
    for messages, tools in _documents(400):
        whole = render(messages, tools)
        for k, message in enumerate(messages, 1):
            if message["role"] == "user":
                closed = render(messages[:k], tools)
                assert whole.startswith(closed)
                assert render(messages[:k], tools, add_generation_prompt=True).startswith(
                    closed + "<|im_start|>assistant\n"
                )


def test_within_a_tool_loop_every_message_extends_the_text() -> None:
    messages: list[Message] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather in Rome?"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "I need the tool.",
            "tool_calls": [{"function": {"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}}],
        },
        {"role": "tool", "content": "12 degrees"},
        {"role": "tool", "content": "13 degrees"},
        {"role": "assistant", "content": "It is 12 degrees."},
    ]
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": {}}}]
    texts = [render(messages[:k], tools) for k in range(1, len(messages) + 1)]
    for shorter, longer in pairwise(texts):
        assert longer.startswith(shorter)
    assert "<think>\nI need the tool.\n</think>" in texts[-1]
    assert (
        "<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n2\n</parameter>\n</function>"
        in texts[-1]
    )


def test_the_generation_prompt_is_continued_by_the_answer_as_trained() -> None:
    messages: list[Message] = [{"role": "user", "content": "Hi"}]
    answered = [*messages, {"role": "assistant", "content": "Hello!"}]
    assert render(answered) == render(messages, add_generation_prompt=True) + "Hello!<|im_end|>\n"
    thinking = [*messages, {"role": "assistant", "content": "Hello!", "reasoning_content": "Greet."}]
    prompt = render(messages, add_generation_prompt=True, enable_thinking=True)
    assert render(thinking) == prompt + "Greet.\n</think>\n\nHello!<|im_end|>\n"


def test_thinking_is_stripped_from_the_history() -> None:
    for answer in (
        {"role": "assistant", "content": "<think>\nhidden\n</think>\n\nHello!"},
        {"role": "assistant", "content": "Hello!", "reasoning_content": "hidden"},
    ):
        text = render([{"role": "user", "content": "Hi"}, answer, {"role": "user", "content": "Again"}])
        assert "hidden" not in text
        assert "<|im_start|>assistant\nHello!<|im_end|>" in text


def test_content_may_be_text_parts() -> None:
    parts = [{"type": "text", "text": "Hello, "}, {"type": "text", "text": "you."}]
    assert render([{"role": "user", "content": parts}]) == render([{"role": "user", "content": "Hello, you."}])


@pytest.mark.parametrize(
    ("messages", "told"),
    [
        ([{"role": "wizard", "content": "x"}], "wizard"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], "text only"),
        ([], "no messages"),
        (
            [
                {"role": "user", "content": "x"},
                {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
            ],
            "must be an object",
        ),
    ],
)
def test_what_the_template_cannot_render_is_refused(messages: list[Message], told: str) -> None:
    with pytest.raises(TemplateError, match=told):
        render(messages)


def test_tokens_cut_at_the_generation_prompt_are_the_tokens_of_the_whole() -> None:
    tokenizer = load_tokenizer()
    rng = random.Random(0)
    for messages, tools in rng.sample(_documents(200), 60):
        if messages[-1].get("tool_calls") or "reasoning_content" in messages[-1]:
            continue
        prompt = tokenizer.encode(
            render(messages[:-1], tools, add_generation_prompt=True), add_special_tokens=False
        ).ids
        whole = tokenizer.encode(render(messages, tools), add_special_tokens=False).ids
        if messages[-2]["role"] == "user":
            assert whole[: len(prompt)] == prompt


def test_decoding_keeps_the_tags_that_parsers_need() -> None:
    tokenizer = load_tokenizer()
    ids = tokenizer.encode("<|im_start|><think>a</think><tool_call>", add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<think>a</think><tool_call>"
