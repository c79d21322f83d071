"""Whatever a client sends, it gets an answer or an error that names the field; never a failure of the daemon."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from server.schema.chat import ChatCompletionRequest
from server.schema.foreign import FLATTENED, REFUSED, RENAMED

pytestmark = pytest.mark.anyio

FIELDS = (*ChatCompletionRequest.model_fields, *RENAMED, *REFUSED, *FLATTENED, "user")
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(("role", "content", "type", "text")) | st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)
TEXT_PART = st.fixed_dictionaries({"type": st.sampled_from(("text", "image_url", "x")), "text": st.text(max_size=9)})
MESSAGE = st.fixed_dictionaries(
    {
        "role": st.sampled_from(("system", "developer", "user", "assistant", "tool", "x")),
        "content": st.text(max_size=20) | st.lists(TEXT_PART, max_size=2) | ANYTHING,
    },
    optional={"reasoning_content": ANYTHING, "tool_calls": ANYTHING, "name": ANYTHING},
)
BODY = st.fixed_dictionaries({"messages": st.lists(MESSAGE | ANYTHING, max_size=3) | ANYTHING}) | ANYTHING
EXTRAS = st.dictionaries(st.sampled_from([field for field in FIELDS if field != "messages"]), ANYTHING, max_size=2)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(body=BODY, extras=EXTRAS)
async def test_no_body_makes_the_daemon_fail(client, body, extras):
    if isinstance(body, dict):
        body = body | extras | {"max_completion_tokens": 1}
    response = await client.post(
        "/v1/chat/completions", content=json.dumps(body), headers={"content-type": "application/json"}
    )
    assert response.status_code in (200, 400, 404)
    if response.status_code != 200:
        error = response.json()["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert error["message"]


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(body=st.binary(max_size=64))
async def test_no_bytes_make_the_daemon_fail(client, body):
    response = await client.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["code"]
