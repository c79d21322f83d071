import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.text.reasoning import ReasoningSplitter, opens_reasoning

CASES = [
    ("plain", "Hello there.", False, "", "Hello there."),
    ("plain keeps its own blank space", " Hello\n", False, "", " Hello\n"),
    ("empty block", "<think>\n\n</think>\n\nHello", False, "", "Hello"),
    ("block", "<think>\nWell,  yes.\n</think>\n\nHello", False, "Well,  yes.", "Hello"),
    ("block opened by the prompt", "\nWell.\n</think>\n\nHello", True, "Well.", "Hello"),
    ("block never closed", "<think>\nWell. \n", False, "Well.", ""),
    ("half a closing tag at the end", "<think>\na </thi", False, "a </thi", ""),
    ("half an opening tag at the end", "<thi", False, "", "<thi"),
    ("a tag that is only similar", "<thinner> is it", False, "", "<thinner> is it"),
    ("a block later in the answer is text", "Say <think>x</think>", False, "", "Say <think>x</think>"),
    ("nothing", "", False, "", ""),
    ("a lone block", "<think>a</think>", False, "a", ""),
]


def split(pieces: list[str], starts_inside: bool) -> tuple[str, str]:
    splitter = ReasoningSplitter(starts_inside=starts_inside)
    parts = [*map(splitter.feed, pieces), splitter.finish()]
    return "".join(part.reasoning for part in parts), "".join(part.content for part in parts)


@pytest.mark.parametrize(
    ("text", "starts_inside", "reasoning", "content"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_split_is_the_same_whole_and_character_by_character(text, starts_inside, reasoning, content):
    assert split([text], starts_inside) == (reasoning, content)
    assert split(list(text), starts_inside) == (reasoning, content)


@given(st.lists(st.sampled_from(["<think>", "</think>", "<thi", "nk>", "</", "a b", "\n", " ", "é"])), st.booleans())
def test_split_does_not_depend_on_where_the_pieces_end(pieces, starts_inside):
    assert split(pieces, starts_inside) == split(["".join(pieces)], starts_inside)


def test_content_is_not_held_back_once_it_began():
    splitter = ReasoningSplitter()
    assert splitter.feed("H").content == "H"
    assert splitter.feed("<").content == "<"


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("<|im_start|>assistant\n<think>\n", True), ("<think>\n\n</think>\n\n", False), ("assistant\n", False)],
)
def test_prompt_that_leaves_a_block_open(prompt, expected):
    assert opens_reasoning(prompt) is expected
