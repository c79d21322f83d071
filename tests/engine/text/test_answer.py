"""An answer's tokens as its client sees them: the thinking apart, and stop strings looked for behind it."""

import itertools

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from engine.request import SamplingParams, Thinking, TokenLogprob
from engine.text.answer import AnswerText
from engine.text.tokenizer import Tokenizer


class Letters:
    """A detokenizer whose tokens are the places of these texts."""

    def __init__(self, texts):
        self._texts = texts

    def push(self, token_id):
        return self._texts[token_id]

    def flush(self):
        return ""


def through(texts, thinking, **options):
    answer = AnswerText(Letters(texts), SamplingParams(logprobs=0, **options), thinking)
    pieces = []
    for token_id in range(len(texts)):
        pieces.append(answer.push(token_id, TokenLogprob(token_id, -1.0)))
        if answer.is_stopped:
            break
    pieces.append(answer.flush())
    logprobs = [each.token_id for piece in pieces for each in piece.logprobs]
    return "".join(piece.reasoning for piece in pieces), "".join(piece.text for piece in pieces), logprobs, answer


THOUGHT = ["<think>", "One.", "\n\n", "Two.", "\n", "</think>", "\n\n", "Yes", ".", "\n\n", "No"]


@pytest.mark.parametrize(
    ("texts", "thinking"),
    [(THOUGHT, Thinking.MAY_COME), (THOUGHT[1:], Thinking.IS_OPEN), (list("".join(THOUGHT)), Thinking.MAY_COME)],
    ids=["opened by the answer", "opened by the prompt", "letter by letter"],
)
def test_a_stop_string_is_looked_for_behind_the_thinking(texts, thinking):
    reasoning, content, _, answer = through(texts, thinking, stop=("\n\n",))
    assert (reasoning, content, answer.is_stopped) == ("One.\n\nTwo.", "Yes.", True)


@pytest.mark.parametrize("stop", ["</think>", "<think>", "One", "think>\n\n"])
def test_neither_the_thinking_nor_its_tags_stop_an_answer(stop):
    reasoning, content, _, answer = through(THOUGHT, Thinking.MAY_COME, stop=(stop,))
    assert (reasoning, content, answer.is_stopped) == ("One.\n\nTwo.", "Yes.\n\nNo", False)


def test_a_stop_string_is_found_at_once_where_nothing_was_thought():
    assert through(["<th", "e end", "."], Thinking.MAY_COME, stop=("end",))[1] == "<the "
    assert through(THOUGHT, Thinking.IS_TEXT, stop=("\n\n",))[1] == "<think>One."


def test_thinking_is_counted_with_its_tags():
    assert through(THOUGHT, Thinking.MAY_COME)[3].reasoning_tokens == 6
    assert through(THOUGHT[1:], Thinking.IS_OPEN)[3].reasoning_tokens == 5
    assert through(THOUGHT[1:4], Thinking.IS_OPEN)[3].reasoning_tokens == 3
    assert through(["<th", "e", " end"], Thinking.MAY_COME)[3].reasoning_tokens == 0
    assert through(THOUGHT, Thinking.IS_TEXT)[3].reasoning_tokens == 0


def test_each_log_probability_comes_once_but_for_those_of_the_stop_string():
    assert through(THOUGHT, Thinking.MAY_COME)[2] == list(range(11))
    assert through(THOUGHT, Thinking.MAY_COME, stop=("\n\n",))[2] == list(range(9))


@pytest.mark.parametrize("special", [False, True], ids=["ordinary tags", "special tags"])
def test_the_tags_of_a_checkpoint_are_seen_whether_it_marks_them_special_or_not(special):
    vocabulary = {token: index for index, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    library = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["<|im_end|>"])
    tags = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
    library.add_tokens([tokenizers.AddedToken(tag, special=special) for tag in tags])
    tokenizer = Tokenizer(library, {})
    answer = AnswerText(tokenizer.new_detokenizer(), SamplingParams(), Thinking.IS_OPEN)
    token_ids = tokenizer.encode("So.</think>\n\nYes.<tool_call>a</tool_call><|im_end|>")
    pieces = [*map(answer.push, token_ids), answer.flush()]
    assert "".join(piece.reasoning for piece in pieces) == "So."
    assert "".join(piece.text for piece in pieces) == "Yes.<tool_call>a</tool_call>"


def test_pieces_say_the_same_however_the_tokens_fall():
    text = "".join(THOUGHT)
    for first, second in itertools.combinations(range(1, len(text)), 2):
        texts = [text[:first], text[first:second], text[second:]]
        reasoning, content, logprobs, _ = through(texts, Thinking.MAY_COME, stop=("\n\nN",))
        assert (reasoning, content) == ("One.\n\nTwo.", "Yes.")
        assert logprobs == sorted(set(logprobs))
