"""Reuse does not depend on how a conversation is sent, nor on how large the pools are: S06, S08 and S15."""

from __future__ import annotations

import itertools

import httpx
import pytest

from engine.catalog import resolve_model
from engine.text.chat_template import ChatTemplate
from engine.text.slices import in_one_go
from engine.text.tokenizer import Tokenizer
from server.frontiers import marked_places
from tests.e2e.conftest import run_daemon
from tests.scenarios.sse import events
from tests.scenarios.talking import system, user
from tests.waiting import PATIENCE_SECONDS

PAGES, CONTEXT, SEATS, SLOTS = 100, 1024, 2, 3
TOOLS = [
    {
        "type": "function",
        "function": {"name": "look_up", "parameters": {"type": "object", "properties": {"ship": {"type": "string"}}}},
    }
]


@pytest.fixture(scope="module")
def daemon():
    flags = ["--max-context", CONTEXT, "--kv-pages", PAGES, "--page-size", 16]
    flags += ["--max-concurrency", SEATS, "--device-state-slots", SLOTS]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        with run_daemon(resolve_model("demo"), *map(str, flags)) as process:
            yield process


@pytest.fixture(scope="module")
def closure():
    """The tokens up to the last boundary before the assistant's turn opens."""
    template, tokenizer = ChatTemplate.load(resolve_model("demo")), Tokenizer.load(resolve_model("demo"))

    def count(messages, tools=None) -> int:
        text = template.render(messages, tools=tools)
        return len(tokenizer.encode(text[: max(min(in_one_go(marked_places(template, text, messages, {}, tools))), 0)]))

    return count


def thinking(reasoning: str | None, number: int) -> dict[str, object]:
    call = {"function": {"name": "look_up", "arguments": {"ship": str(number)}}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    return message if reasoning is None else message | {"reasoning_content": reasoning}


@pytest.mark.anyio
@pytest.mark.parametrize("habits", list(itertools.product([True, False], repeat=3)), ids=str)
async def test_s06_reasoning_that_is_kept_or_stripped_on_replay_hits_at_the_frontier_that_fits(talking, habits):
    """A client that keeps, or strips, or changes its mind: every step of a tool loop, and the turn after it, hit."""
    async with talking(device_state_slots=16) as talk:
        history = [user("Which ships are in the harbour?")]
        await talk.ask(history)
        least = talk.closure(history).tokens
        for number, keeps in enumerate(habits):
            history += [
                thinking("I have to look it up." if keeps else None, number),
                {"role": "tool", "content": f"Ship {number} is here."},
            ]
            expected = talk.best(history)
            assert (await talk.ask(history)).reuse.cached_tokens == expected >= least
            least = talk.closure(history).tokens
        # The template drops the reasoning of former turns, so a new question goes back to where this turn began.
        history += [{"role": "assistant", "content": "Three."}, user("And now?")]
        expected = talk.best(history)
        assert (await talk.ask(history)).reuse.cached_tokens == expected >= talk.closure(history[:1]).tokens


@pytest.mark.anyio
@pytest.mark.parametrize("host_cache_mib", [0, 8])
@pytest.mark.parametrize(("seats", "spare"), [(1, 0), (1, 1), (2, 0), (1, 2), (2, 1), (1, 5), (1, 16)])
async def test_s08_the_automatic_checkpoints_of_one_request_never_exceed_the_pool(
    talking, steps, seats, spare, host_cache_mib
):
    sizes = {"max_concurrency": seats, "device_state_slots": spare, "host_cache_mib": host_cache_mib}
    async with talking(**sizes, prefill_chunk=16) as talk:
        for number in range(1 + seats + spare):
            await talk.ask((300 + number, 400), max_tokens=1)
        captured: list[int] = []

        def note(_runner, plan):
            captured.extend(segment.capture_slot for segment in plan.segments if segment.capture_slot is not None)

        steps.before = note
        body = [system("You count."), user("Ships. " * 100)]
        await talk.ask(body, max_tokens=1)
        named, capacity = len(talk.request(body).frontiers), talk.engine.snapshot().state_slots.capacity
        assert named == 2
        if host_cache_mib:
            # One that is in host memory already gives its slot to the next.
            assert len(set(captured)) < capacity or capacity == 1
        elif capacity > named:
            # The turn may take the slot of the system prompt, on which nobody else stands yet.
            assert len(captured) - 1 == len(set(captured[:-1])) < capacity
            assert len(set(captured)) < capacity
        else:
            # Both named ones in turn, in what the request itself leaves.
            assert len(set(captured)) == capacity - 1
        if capacity > 1:
            assert (await talk.ask(body)).reuse.cached_tokens == talk.closure(body).tokens


def test_s08_the_start_up_says_how_many_conversations_fit(daemon):
    fit = min(PAGES // -(-CONTEXT // 16), SEATS + SLOTS)
    assert f"; {fit} conversations of {CONTEXT:,} tokens fit" in daemon.process.stdout.readline()


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["no tools", "tools"])
@pytest.mark.parametrize("streams", list(itertools.product([False, True], repeat=2)), ids=str)
def test_s15_streamed_or_not_the_same_conversation_hits_with_and_without_tools(daemon, closure, tools, streams):
    history = [user(f"Which ships are here, {streams} {bool(tools)}?")]
    with httpx.Client(base_url=daemon.url, timeout=PATIENCE_SECONDS) as client:

        def cached(stream: bool) -> int:
            body = {"messages": history, "max_tokens": 2, "temperature": 0, "stream": stream}
            response = client.post("/v1/chat/completions", json=body | ({"tools": tools} if tools else {}))
            assert response.status_code == 200, response.text
            answer = events(response.text)[-1] if stream else response.json()
            return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

        first = closure(history, tools)
        assert cached(streams[0]) < first
        assert cached(streams[1]) == first
        history += [{"role": "assistant", "content": "The Swan."}, user("And yesterday?")]
        assert cached(streams[1]) == first
        assert cached(streams[0]) == closure(history, tools)


def shared_by(client, bodies) -> int:
    """Leading tokens that they have in common."""
    first, *others = (client.post("/tokenize", json=body).json()["tokens"] for body in bodies)
    return next(place for place, token in enumerate(first) if any(other[place] != token for other in others))


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_text_that_prompts_share_is_reused_from_the_third_on_whatever_the_chunk(daemon, path):
    examples = f"{path}: a ship is a boat, a stone is no boat, a harbour is no boat. " * 12
    texts = [f"{examples}{number} ships?" for number in range(5)]
    key = "prompt" if path == "/v1/completions" else "messages"
    bodies = [{key: text if key == "prompt" else [user(text)]} for text in texts]
    with httpx.Client(base_url=daemon.url, timeout=60) as client:
        shared = shared_by(client, bodies)
        answers = [client.post(path, json=body | {"max_tokens": 2, "temperature": 0}).json() for body in bodies]
        cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
        assert 200 < shared < 512
        assert cached[2:] == [shared] * 3
        records = [client.get(f"/admin/requests/{answer['id']}").json()["answers"][0] for answer in answers]
        assert {record["result"]["diverged_at"] for record in records} == {None}
