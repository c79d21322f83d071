"""The page at /docs: the whole OpenAPI document, without a script and from nowhere else."""

import re

import pytest

from server.api_page import render_api_page
from server.app import create_app
from server.settings import Settings
from tests.server.conftest import client_of

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def app():
    return create_app(Settings())


@pytest.fixture
async def answer(app):
    async with client_of(app) as client:
        return await client.get("/docs")


async def test_every_operation_body_and_field_is_there_and_every_link_leads_somewhere(app, answer):
    document, page = app.openapi(), answer.text
    anchors = re.findall(r' id="([^"]+)"', page)
    assert len(anchors) == len(set(anchors))
    wanted = {f"{method}{path}" for path, methods in document["paths"].items() for method in methods}
    assert wanted | set(document["components"]["schemas"]) == set(anchors)
    assert set(re.findall(r'href="#([^"]+)"', page)) <= set(anchors)
    fields = {name for schema in document["components"]["schemas"].values() for name in schema.get("properties", {})}
    assert fields <= set(re.findall(r"<code>([^<]+)</code>", page))


async def test_it_runs_no_script_and_asks_no_other_host(answer):
    assert "<script" not in answer.text
    assert "http:" not in answer.text.replace("https:", "http:")
    assert set(re.findall(r'(?:src|href)="([^#"]+)"', answer.text)) == {
        *("dashboard/icon.svg", "dashboard/docs.css", "openapi.json", "./")
    }
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none';")
    assert not re.search("script|unsafe|http|\\*", policy)
    assert "frame-ancestors 'none'" in policy


async def test_it_is_sent_once_and_answers_head(app, answer):
    async with client_of(app) as client:
        again = await client.get("/docs", headers={"if-none-match": answer.headers["etag"]})
        head = await client.head("/docs")
    assert (again.status_code, again.content) == (304, b"")
    assert (head.status_code, head.content) == (200, b"")


def test_types_are_told_in_words_and_no_text_is_taken_for_html():
    field = {
        "anyOf": [{"type": "array", "items": {"$ref": "#/components/schemas/Part"}, "minItems": 1}, {"type": "null"}],
        "description": "<script>alert(1)</script>",
        "default": "<b>",
    }
    page = render_api_page(
        {
            "info": {"title": "<i>", "version": "1", "description": ""},
            "paths": {
                "/x": {"post": {"description": "Do it.", "responses": {"200": {"description": "ok", "content": {}}}}}
            },
            "components": {
                "schemas": {
                    "Whole": {"properties": {"parts": field}, "required": ["parts"]},
                    "Part": {"enum": ["a", "b"]},
                }
            },
        }
    )
    assert "<script" not in page
    assert "<b>" not in page
    assert "<i>" not in page
    assert 'list of <a href="#Part">Part</a> (items ≥ 1)' in page
    assert "&#39;a&#39;, &#39;b&#39;" in page
    assert "<code>parts</code> (required)" in page
