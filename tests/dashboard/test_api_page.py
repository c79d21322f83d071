"""The page of the API in a real browser."""

from __future__ import annotations

from urllib.parse import urlsplit

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect

from tests.dashboard.conftest import visit


def test_it_is_whole_without_any_other_host_and_readable_by_everybody(context, daemon):
    with visit(context, f"{daemon.url}/docs") as seen:
        page = seen.page
        expect(page.get_by_role("heading", level=1)).to_contain_text("the API")
        page.get_by_role("link", name="POST /v1/chat/completions").click()
        expect(page.get_by_role("heading", name="POST /v1/chat/completions")).to_be_in_viewport()
        page.locator("main").get_by_role("link", name="ChatCompletionRequest").first.click()
        expect(page.get_by_role("heading", name="ChatCompletionRequest")).to_be_in_viewport()
        assert seen.hosts == {urlsplit(daemon.url).netloc}
        assert seen.complaints == []
        assert Axe().run(page, options={"resultTypes": ["violations"]}).response["violations"] == []
