"""What the page is made of, as the daemon sends it."""

from __future__ import annotations

import gzip
import re
from importlib.resources import files
from pathlib import Path

import httpx
import pytest

import server.routes.dashboard as dashboard
from server.boundary import RequestBoundary
from server.errors import install_error_handlers
from tests.server.conftest import client_of

FOLDER = Path(__file__).parents[2] / "ops" / "dashboard"
NAMES = sorted(path.name for path in FOLDER.iterdir() if path.suffix in dashboard.CONTENT_TYPES)

pytestmark = pytest.mark.anyio


@pytest.fixture
async def client():
    from fastapi import FastAPI

    app = FastAPI()
    app.include_router(dashboard.router)
    install_error_handlers(app)
    app.add_middleware(RequestBoundary, api_keys=["a key"], admin_key="another")
    async with client_of(app, client=("203.0.113.7", 123)) as client:
        yield client


@pytest.mark.parametrize("name", NAMES)
async def test_every_file_is_sent_as_it_is_to_whoever_asks(client, name):
    answer = await client.get(f"/dashboard/{name}")
    assert answer.status_code == 200
    assert answer.content == (FOLDER / name).read_bytes()
    assert answer.headers["content-type"] == dashboard.CONTENT_TYPES[Path(name).suffix]
    assert answer.headers["content-security-policy"].startswith("default-src 'self';")
    assert "unsafe" not in answer.headers["content-security-policy"]


async def test_the_page_is_at_the_root(client):
    answer = await client.get("/")
    assert answer.content == (FOLDER / "index.html").read_bytes()
    assert (await client.get("/dashboard/index.html")).content == answer.content


async def test_the_chart_library_is_that_of_the_installed_package(client):
    answer = await client.get("/dashboard/plotly.min.js", headers={"accept-encoding": "identity"})
    assert answer.content == (files("plotly") / "package_data" / "plotly.min.js").read_bytes()
    assert "content-encoding" not in answer.headers


@pytest.mark.parametrize("encoding", ["identity", "gzip"])
async def test_what_a_browser_has_already_is_not_sent_again(client, encoding):
    asked = {"accept-encoding": encoding}
    first = await client.get("/dashboard/main.js", headers=asked)
    again = await client.get("/dashboard/main.js", headers=asked | {"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["etag"] == first.headers["etag"]
    changed = await client.get("/dashboard/main.js", headers=asked | {"if-none-match": '"of an older version"'})
    assert changed.status_code == 200


async def test_a_head_tells_the_size_without_the_content(client):
    asked = {"accept-encoding": "gzip"}
    head = await client.head("/", headers=asked)
    whole = await client.get("/", headers=asked)
    assert head.content == b""
    assert head.headers["content-length"] == whole.headers["content-length"]


async def test_the_compressed_form_is_the_same_file(client):
    async with client.stream("GET", "/dashboard/style.css", headers={"accept-encoding": "gzip"}) as answer:
        raw = b"".join([piece async for piece in answer.aiter_raw()])
    assert gzip.decompress(raw) == (FOLDER / "style.css").read_bytes()
    assert answer.headers["vary"] == "accept-encoding"


@pytest.mark.parametrize(
    "path",
    [
        "/dashboard/",
        "/dashboard/nothing.js",
        "/dashboard/..%2f__init__.py",
        "/dashboard/%2e%2e/health.py",
        "/dashboard/..%2findex.html",
        "/dashboard//etc/passwd",
        "/dashboard/main.js%00",
        "/dashboard/MAIN.JS",
    ],
)
async def test_no_other_name_leads_to_a_file(client, path):
    answer = await client.get(httpx.URL(f"http://daemon{path}"))
    assert answer.status_code == 404


async def test_nothing_of_it_names_another_host():
    """A link to the outside would tell that host of every visit."""
    for name in NAMES:
        found = set(re.findall(r"//[\w-]+\.[\w./-]+", (FOLDER / name).read_text()))
        assert found <= {"//www.w3.org/2000/svg"}, name
