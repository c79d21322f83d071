"""The dashboard of a daemon that asks for a key, and of one that goes away and comes back."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import expect

from tests.dashboard.conftest import SMALL, Traffic, visit
from tests.e2e.conftest import run_daemon

ADMIN_KEY = "operators-only-4711"


@pytest.fixture(scope="module")
def guarded():
    with run_daemon(Path("demo"), *SMALL, "--admin-key", ADMIN_KEY) as daemon:
        Traffic(daemon.url, "guest").turn()
        yield daemon


def _enter(page, key):
    page.get_by_label("Key", exact=True).fill(key)
    page.keyboard.press("Enter")


def test_a_key_is_asked_for_and_kept_for_this_tab(context, guarded):
    with visit(context, guarded.url) as seen:
        page = seen.page
        form = page.get_by_role("region", name="This daemon asks for a key")
        expect(form).to_contain_text("the admin key of this daemon")
        expect(page.locator("#status-headline")).to_contain_text("Healthy")
        _enter(page, "a guess")
        expect(form).to_contain_text("The key was not the right one")
        _enter(page, ADMIN_KEY)
        expect(form).to_be_hidden()
        expect(page.locator("#requests tbody tr")).to_have_count(1)
        page.reload()
        expect(page.locator("#requests tbody tr")).to_have_count(1)
        assert ADMIN_KEY not in page.url
        assert page.evaluate("localStorage.length") == 0
        page.get_by_role("button", name="Forget the key").click()
        expect(form).to_be_visible()
        assert page.evaluate("sessionStorage.length") == 0
        with visit(context, guarded.url) as other:
            expect(other.page.get_by_role("region", name="This daemon asks for a key")).to_be_visible()


def test_a_daemon_that_goes_away_is_noticed_and_taken_up_again(context, guarded):
    """Comes last: it ends the daemon."""
    with visit(context, guarded.url) as seen:
        page = seen.page
        rows = page.locator("#requests tbody tr")
        _enter(page, ADMIN_KEY)
        expect(rows).to_have_count(1)
        guarded.process.kill()
        guarded.process.wait()
        expect(page.locator("#status-headline")).to_have_text("The daemon does not answer")
        expect(page.locator("#status-detail")).to_contain_text("What is below is from")
        expect(page.locator("body")).to_have_attribute("data-stale", "true")
        expect(rows).to_have_count(1)
        port = str(urlsplit(guarded.url).port)
        with run_daemon(Path("demo"), *SMALL, "--admin-key", ADMIN_KEY, "--port", port):
            expect(page.locator("body")).to_have_attribute("data-stale", "false")
            expect(page.locator("#status-headline")).to_contain_text("Healthy")
            expect(rows).to_have_count(0)
