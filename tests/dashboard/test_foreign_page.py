"""A page from elsewhere, in a real browser, before a daemon without keys."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx
import pytest
from playwright.sync_api import Page, sync_playwright

from tests.dashboard.conftest import FLAGS, PATIENCE_MS
from tests.waiting import PATIENCE_SECONDS

RESET = '{"tiers": ["device", "host", "disk"]}'


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[str]:
    """Where evil.example has its page."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.end_headers()
            self.wfile.write(b"<!doctype html><link rel=icon href=data:,><title>A page from elsewhere</title>")

        def log_message(self, *_arguments: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://evil.example:{server.server_port}/"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def page(chromium: str) -> Iterator[Page]:
    """In a browser for which every evil name is this machine's, as after a DNS rebinding."""
    with sync_playwright() as playwright:
        flags = [*FLAGS, "--host-resolver-rules=MAP *.example 127.0.0.1"]
        browser = playwright.chromium.launch(executable_path=chromium, args=flags)
        page = browser.new_page()
        page.set_default_timeout(PATIENCE_MS)
        yield page
        browser.close()


def is_untouched(daemon) -> bool:
    return httpx.get(f"{daemon.url}/readyz", timeout=PATIENCE_SECONDS).status_code == 200


def status_of(page, daemon, script: str) -> int:
    """What the daemon answers to what the page asks by `script`."""
    port = urlsplit(daemon.url).port
    with page.expect_response(lambda answer: urlsplit(answer.url).port == port) as seen:
        page.evaluate(script)
    return seen.value.status


@pytest.mark.parametrize(
    ("path", "options"),
    [
        ("/admin/drain", "{method: 'POST', mode: 'no-cors'}"),
        ("/admin/cache/audit", "{method: 'POST', mode: 'no-cors'}"),
        ("/admin/cache/reset", f"{{method: 'POST', mode: 'no-cors', body: new Blob(['{RESET}'])}}"),
        ("/v1/chat/completions", "{method: 'POST', mode: 'no-cors', body: '{\"messages\": []}'}"),
        ("/metrics", "{mode: 'no-cors'}"),
        ("/admin/requests", "{mode: 'no-cors'}"),
    ],
)
def test_what_a_page_sends_of_its_own_accord_is_refused(page, elsewhere, daemon, path, options):
    page.goto(elsewhere)
    assert status_of(page, daemon, f"void fetch('{daemon.url}{path}', {options})") == 403
    assert is_untouched(daemon)


def test_a_form_that_sends_itself_is_refused(page, elsewhere, daemon):
    page.goto(elsewhere)
    form = "document.body.innerHTML = `<form method=post action='%s/admin/drain'></form>`; document.forms[0].submit()"
    assert status_of(page, daemon, form % daemon.url) == 403
    assert is_untouched(daemon)


@pytest.mark.parametrize(
    ("path", "options"),
    [
        ("/insights", "{}"),
        ("/admin/cache/reset", f"{{method: 'POST', headers: {{'content-type': 'application/json'}}, body: '{RESET}'}}"),
        ("/metrics", "{headers: {authorization: 'Bearer guess'}}"),
    ],
)
def test_what_a_page_asks_to_read_or_to_say_is_kept_from_it_by_the_browser(page, elsewhere, daemon, path, options):
    page.goto(elsewhere)
    outcome = page.evaluate(f"fetch('{daemon.url}{path}', {options}).then(() => 'read', error => error.name)")
    assert outcome == "TypeError"
    assert is_untouched(daemon)


def test_a_page_whose_name_is_looked_up_as_this_machine_reads_and_changes_nothing(page, daemon):
    port = urlsplit(daemon.url).port
    page.goto(f"http://evil.example:{port}/livez")
    for path, method in (("/admin/drain", "POST"), ("/admin/cache", "GET"), ("/metrics", "GET"), ("/v1/models", "GET")):
        ask = f"fetch('{path}', {{method: '{method}'}}).then(answer => answer.status)"
        assert page.evaluate(ask) == 403, path
    assert is_untouched(daemon)


def test_the_daemons_own_page_may(page, daemon):
    """Comes last: it drains the daemon, and undoes it."""
    page.goto(f"{daemon.url}/livez")
    for path, ready in (("/admin/drain", 503), ("/admin/undrain", 200)):
        assert page.evaluate(f"fetch('{path}', {{method: 'POST'}}).then(answer => answer.status)") == 200
        assert httpx.get(f"{daemon.url}/readyz", timeout=PATIENCE_SECONDS).status_code == ready
