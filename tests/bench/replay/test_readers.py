"""Both trace formats: what is read, what is written, and the errors that name line, field, finding and remedy."""

from __future__ import annotations

import json

import pytest

from bench.replay.agentic import Traffic, make_calls
from bench.replay.conversations import ConversationTrace, read_conversations, write_conversations
from bench.replay.mooncake import MooncakeTrace
from bench.replay.readers import read_trace
from bench.replay.requests import TraceError
from cache import CheckpointKind, Frontier

BLOCKS = {"timestamp": 500, "input_length": 1100, "output_length": 7, "hash_ids": [4, 5, 6]}
CALL = {
    "at_seconds": 1.5,
    "thread": "a",
    "messages": [["system", "s", 32], ["user", "u", 20]],
    "answer": ["x", 16],
}


def _file(tmp_path, *lines):
    path = tmp_path / "trace.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_a_block_is_a_symbol_and_lengths_stay_exact(tmp_path):
    (request,) = MooncakeTrace(_file(tmp_path, BLOCKS), stretch=2).requests()
    assert (request.prompt, request.prompt_tokens, request.output_tokens) == ((4, 5, 6), 1100, 7)
    assert request.arrival_seconds == 1.0


def test_messages_become_symbols_and_frontiers(tmp_path):
    (request,) = read_conversations(_file(tmp_path, CALL)).requests()
    # Two for the system text, two for 20 tokens, one that opens the answer; one for the answer.
    assert (len(request.prompt), len(request.answer), request.prompt_tokens) == (5, 1, 80)
    assert request.frontiers == (
        Frontier(2, CheckpointKind.SHARED_STABLE_PREFIX),
        Frontier(4, CheckpointKind.PRIVATE_TURN_CLOSURE),
    )


@pytest.mark.parametrize("thinking_tokens", [0, 40])
def test_an_answer_that_is_sent_back_continues_the_request_unless_it_had_thoughts(tmp_path, thinking_tokens):
    later = CALL | {"at_seconds": 2, "messages": [*CALL["messages"], ["assistant", "x", 16], ["user", "v", 16]]}
    trace = read_conversations(_file(tmp_path, CALL | {"thinking_tokens": thinking_tokens}, later))
    first, second = trace.requests()
    whole = first.prompt + first.answer
    assert (second.prompt[: len(whole)] == whole) == (thinking_tokens == 0)
    assert second.prompt[:4] == first.prompt[:4]


def test_a_written_trace_reads_back_as_the_same_requests(tmp_path):
    calls = make_calls(Traffic(sessions=3, hours=0.2, seed=1))
    assert write_conversations(tmp_path / "out.jsonl", calls) == len(calls)
    again = list(read_trace(tmp_path / "out.jsonl").requests())
    made = list(ConversationTrace("made", calls).requests())
    assert [(r.prompt, r.answer, r.frontiers, r.thread) for r in again] == [
        (r.prompt, r.answer, r.frontiers, r.thread) for r in made
    ]


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ([BLOCKS, "{"], ["line 2", "not JSON", "repair"]),
        (["[]", BLOCKS], ["line 1", "[]", "JSON object"]),
        ([BLOCKS | {"timestamp": "soon"}], ["line 1", "'timestamp'", "'soon'", "whole number"]),
        ([BLOCKS | {"input_length": 0}], ["line 1", "'input_length'", "0", "at least 1"]),
        ([BLOCKS | {"hash_ids": [1, "2", 3]}], ["line 1", "'hash_ids'", "whole numbers"]),
        ([BLOCKS | {"hash_ids": [1]}], ["line 1", "1 ids", "3 blocks of 512"]),
        ([BLOCKS, BLOCKS | {"timestamp": 1}], ["line 2", "'timestamp'", "1 after 500", "sort"]),
        ([CALL, CALL | {"at_seconds": -1}], ["line 2", "'at_seconds'", "-1", "seconds"]),
        ([CALL | {"thread": 5}], ["line 1", "'thread'", "5", "a string"]),
        ([CALL | {"messages": []}], ["line 1", "'messages'", "[]", "at least one"]),
        ([CALL | {"messages": [["user", "u"]]}], ["line 1", "messages[0]", "[role, content, tokens]"]),
        ([CALL | {"messages": [["robot", "u", 3]]}], ["line 1", "messages[0]", "'robot'", "system, user"]),
        ([CALL | {"answer": ["x", 0]}], ["line 1", "'answer'", "at least 1"]),
        ([CALL | {"thinking_tokens": -3}], ["line 1", "'thinking_tokens'", "-3"]),
        ([CALL | {"color": "red"}], ["line 1", "'color'", "remove"]),
        ([CALL, CALL | {"at_seconds": 0}], ["line 2", "'at_seconds'", "0 after 1.5", "sort"]),
        ([], ["is empty", "JSON object a line"]),
    ],
    ids=lambda value: None,
)
def test_a_bad_line_is_named_with_its_field_and_a_remedy(tmp_path, lines, told):
    with pytest.raises(TraceError) as error:
        read_trace(_file(tmp_path, *lines))
    assert all(part in str(error.value) for part in told), str(error.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(TraceError, match=r"none\.jsonl cannot be read"):
        read_trace(tmp_path / "none.jsonl")
