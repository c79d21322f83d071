"""The corpus: the same from the same seed, free of held-out questions, every pattern expandable."""

from __future__ import annotations

import random

import pytest

from training.demo.config import TrainPlan
from training.demo.corpus.documents import document
from training.demo.corpus.grammar import Context, GrammarError, parse, read_lexicon
from training.demo.corpus.intents import exchange, fresh, intents, lexicon, sentence_case, tidy
from training.demo.corpus.skills import skill
from training.demo.corpus.story_requests import request_and_story
from training.demo.heldout import emitted, heldout_questions, producible
from training.demo.template import render


def test_a_document_depends_on_seed_and_index_alone() -> None:
    first = [render(document(3, i).messages, document(3, i).tools) for i in range(60)]
    again = [render(document(3, i).messages, document(3, i).tools) for i in reversed(range(60))]
    assert first == again[::-1]
    assert first != [render(document(4, i).messages, document(4, i).tools) for i in range(60)]


def test_there_are_many_intents_and_each_expands() -> None:
    found = [*intents("smalltalk"), *intents("daemon")]
    assert len(found) > 150
    for intent in found:
        for pattern in [*intent.questions, *intent.heldout_questions, *intent.answers]:
            for seed in range(3):
                assert tidy(fresh(random.Random(seed), False).expand(pattern))
        question, answer = exchange(intent, fresh(random.Random(1), False))
        assert question
        assert answer


def test_heldout_questions_are_a_hundred_and_cover_the_subjects() -> None:
    questions = heldout_questions()
    assert [question.id for question in questions] == list(range(1, 101))
    assert {question.subject for question in questions} == {"small talk", "stories", "daemon"}


def test_no_pattern_can_become_a_heldout_question() -> None:
    assert [(question.question, pattern) for question, pattern in producible()] == []


@pytest.mark.parametrize("varied", [False, True])
def test_no_early_training_chat_holds_a_heldout_question(varied: bool) -> None:
    assert emitted(2000, TrainPlan().seed, varied) == []


def test_training_text_has_no_heldout_names() -> None:
    held = {entry.text for entry in Context(random.Random(0), lexicon(), heldout=True).entries("town")}
    seen = " ".join(render(document(11, i).messages, document(11, i).tools) for i in range(1500))
    assert held
    assert {town for town in held if f" {town} " in seen} == set()


def test_a_story_holds_what_its_request_names() -> None:
    for seed in range(300):
        ctx = fresh(random.Random(seed), False)
        asked, told, story = request_and_story(ctx)
        if story.name and story.name.lower() in asked.lower():
            assert story.name in told
        if f"a {story.thing}" in asked:
            assert story.thing in told


def test_skills_answer_sums_correctly() -> None:
    rng = random.Random(0)
    sums = [pair for pair in (skill(rng, False) for _ in range(2000)) if " plus " in pair[1]]
    assert sums
    for _, answer in sums:
        left, right = answer.rstrip(".").split(" is ")
        first, second = left.split(" plus ")
        assert int(first) + int(second) == int(right)


@pytest.mark.parametrize("text", ["[never closed", "{Not a slot}"])
def test_a_broken_pattern_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(GrammarError, match=r"(never closed|cannot be read) in"):
        parse(text)


def test_an_unknown_list_is_named() -> None:
    with pytest.raises(GrammarError, match="no_such_list"):
        Context(random.Random(0), lexicon()).expand("{no_such_list}")


def test_a_lexicon_line_without_a_list_is_refused(tmp_path) -> None:
    (tmp_path / "x.txt").write_text("stray entry\n")
    with pytest.raises(GrammarError, match="before the first list"):
        read_lexicon(tmp_path / "x.txt")


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("hello. how are you?", "Hello. How are you?"),
        ("--port sets it.", "--port sets it."),
        ('"come in," he said.', '"Come in," he said.'),
    ],
)
def test_sentences_begin_with_a_capital(given: str, wanted: str) -> None:
    assert sentence_case(given) == wanted
