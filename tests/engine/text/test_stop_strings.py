"""Stop strings: found across every border, cut off exactly, and never seen by the client."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.request import SamplingParams, TokenLogprob
from engine.text.answer import AnswerText
from engine.text.stop_strings import StopStrings


@pytest.mark.parametrize(
    ("strings", "text", "cut"),
    [
        (["."], "One. Two.", "One"),
        (["\n\n"], "a\nb\n\nc", "a\nb"),
        (["abab"], "aababab", "a"),
        (["aab"], "aaab", "a"),
        (["bcd", "c"], "abcd", "ab"),
        (["cd", "bcd"], "abcd", "a"),
        (["x", "yy", "zzz", "END", "STOP"], "yxyy", "y"),
        (["STOP"], "STO", "STO"),
        (["👍🏽"], "ok 👍🏽!", "ok "),
        (["a"], "a", ""),
    ],
)
def test_the_text_ends_before_the_string_that_is_complete_first(strings, text, cut):
    matcher = StopStrings(strings)
    assert "".join([*map(matcher.push, text), matcher.flush()]) == cut
    assert matcher.is_found is (cut != text)


def test_only_what_could_become_a_stop_string_is_held_back():
    matcher = StopStrings(["STOP", "aba"])
    assert [matcher.push(piece) for piece in ("xS", "T", "x", "ab", "b", "ab")] == ["x", "", "STx", "", "abb", ""]
    assert matcher.flush() == "ab"


def test_the_string_can_be_left_in_the_text():
    matcher = StopStrings(["END"], includes_stop=True)
    assert matcher.push("the ENDING") == "the END"


@given(
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.text("ab", max_size=5), max_size=8),
)
def test_the_borders_of_the_pieces_do_not_matter(strings, pieces):
    text = "".join(pieces)
    ends = [(end, -len(s), s) for s in strings for end in range(len(text) + 1) if text[:end].endswith(s)]
    first = min(ends, default=None)
    matcher = StopStrings(strings)
    given_out = "".join([*map(matcher.push, pieces), matcher.flush()])
    assert given_out == (text if first is None else text[: first[0] - len(first[2])])


class Letters:
    """A detokenizer for which token n is the n-th string."""

    def __init__(self, *texts):
        self._texts = texts

    def push(self, token_id):
        return self._texts[token_id]

    def flush(self):
        return ""


def through(texts, **options):
    answer = AnswerText(Letters(*texts), SamplingParams(logprobs=0, **options))
    pieces = []
    for token_id in range(len(texts)):
        pieces.append(answer.push(token_id, TokenLogprob(token_id, -1.0)))
        if answer.is_stopped:
            break
    pieces.append(answer.flush())
    return [(piece.text, [each.token_id for each in piece.logprobs]) for piece in pieces], answer.is_stopped


def test_log_probabilities_come_with_the_text_in_which_their_tokens_begin():
    pieces, is_stopped = through(["a", "xS", "", "T", "y"], stop=("STOP",))
    assert pieces == [("a", [0]), ("x", [1]), ("", []), ("", []), ("STy", [2, 3, 4]), ("", [])]
    assert not is_stopped


def test_log_probabilities_of_the_stop_string_are_dropped():
    pieces, is_stopped = through(["a", "xS", "T", "OP!", "z"], stop=("STOP",))
    assert pieces == [("a", [0]), ("x", [1]), ("", []), ("", []), ("", [])]
    assert is_stopped


def test_a_stop_string_does_not_count_before_the_least_number_of_tokens():
    pieces, is_stopped = through(["a.", "b.", "c.", "d"], stop=(".",), min_tokens=2)
    assert [text for text, _ in pieces] == ["a.", "b.", "c", ""]
    assert is_stopped
