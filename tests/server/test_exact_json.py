"""JSON as it was written: long integers, and text with lone surrogates."""

import json
import sys

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.exact_json import PIECE_BYTES, load
from tests.server.test_door import CHAT, HELLO

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)


@settings(deadline=None)
@given(VALUES, st.sampled_from([None, 1]), st.booleans())
def test_every_value_comes_back(value, indent, ensure_ascii):
    raw = json.dumps(value, indent=indent, ensure_ascii=ensure_ascii).encode()
    assert load(raw) == (value, 0)


@pytest.mark.parametrize("number", [2**63, 2**64 - 1, 2**64, -(2**63) - 1, 10**40, -(10**40)])
def test_an_integer_beyond_64_bits_is_kept(number):
    assert load(b'{"a":%d,"b":[%d, %d],"c":\n%d}' % ((number,) * 4)).value == {
        "a": number,
        "b": [number] * 2,
        "c": number,
    }


@pytest.mark.parametrize("length", [19, 20, 37, 38, 39, 60, 300])
def test_an_integer_is_kept_wherever_the_pieces_of_a_search_end(length):
    number = int("7" * length)
    for place in range(-80, 4):
        raw = b'{"a":"%s","b": -%d}' % (b"x" * (PIECE_BYTES - 12 + place), number)
        assert load(raw).value["b"] == -number


@pytest.mark.parametrize("text", ["1234567890" * 300_000, "123456789012345678901 " * 100_000, "\\" * 500_000])
def test_a_large_text_of_what_is_looked_for_costs_no_more_than_its_length(text):
    calls = []
    raw = b'{"a":"%s"}' % text.encode()

    def count(_frame, event, _argument):
        if event == "call":
            calls.append(event)

    sys.setprofile(count)
    try:
        assert load(raw).replaced == 0
    finally:
        sys.setprofile(None)
    assert len(calls) < len(raw) / 10


@pytest.mark.parametrize(
    ("raw", "value", "replaced"),
    [
        (rb'"\ud800"', "\ufffd", 1),
        (rb'"a\udc00b"', "a\ufffdb", 1),
        (rb'"\ud83d\ude00"', "\U0001f600", 0),
        (rb'"\ud83d\ud83d\ude00\ude00"', "\ufffd\U0001f600\ufffd", 2),
        (rb'"\\ud800 \uD800"', "\\ud800 \ufffd", 1),
        (rb'"\\\ud800"', "\\\ufffd", 1),
        (b'"\xed\xa0\x80a"', "\ufffda", 1),
        (rb'"\ud83d\u0041\uDE00\\\\ud83d"', "\ufffdA\ufffd\\\\ud83d", 2),
        (rb'"\ud83d\\\ude00"', "\ufffd\\\ufffd", 2),
        (rb'["\ud800", 18446744073709551617]', ["\ufffd", 2**64 + 1], 1),
    ],
)
def test_a_lone_surrogate_is_replaced_and_nothing_else(raw, value, replaced):
    assert load(raw) == (value, replaced)


@pytest.mark.parametrize("raw", [b"", b"{", b'"\xff"', b"NaN", b"1e999", rb'["\ud800", NaN]', rb'"\ud80"', b"[" * 5000])
def test_what_is_no_json_is_refused(raw):
    with pytest.raises(orjson.JSONDecodeError):
        load(raw)


@pytest.mark.anyio
async def test_a_conversation_with_a_lone_surrogate_goes_on_and_the_log_says_so(client, caplog):
    async def tokens(content):
        raw = json.dumps(HELLO | {"messages": [{"role": "user", "content": content}]}).encode()
        headers = {"content-type": "application/json", "x-request-id": "abc"}
        return (await client.post(CHAT, content=raw, headers=headers)).json()["usage"]["prompt_tokens"]

    assert await tokens("sec\ud800ret") == await tokens("sec\ufffdret")
    [record] = [record for record in caplog.records if "surrogate" in record.message]
    assert (record.levelname, "abc" in record.message, "ret" in record.message) == ("WARNING", True, False)
