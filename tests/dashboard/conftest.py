"""A real browser before a real daemon under load."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from tests.e2e.conftest import DaemonProcess, run_daemon
from tests.waiting import PATIENCE_SECONDS

PATIENCE_MS = 1000 * PATIENCE_SECONDS

WIDE = {"width": 1440, "height": 1000}
NARROW = {"width": 390, "height": 844}

FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)

SMALL = (
    *("--kv-cache-mib", "16", "--host-cache-mib", "16", "--device-state-slots", "4", "--max-concurrency", "2"),
    *("--throughput-interval-s", "1"),
)
"""Pools that a few conversations fill, and a history that grows quickly."""


@pytest.fixture(scope="session")
def chromium() -> str:
    """Debian's browser. Never skips in CI."""
    path = shutil.which("chromium")
    if path is None:
        message = "the dashboard is NOT tested: there is no chromium; apt-get install chromium"
        if os.environ.get("CI", "").lower() not in {"", "0", "false"}:
            pytest.fail(message)
        pytest.skip(message)
    return path


@pytest.fixture(scope="module")
def browser(chromium: str) -> Iterator[Browser]:
    """Not for the whole session: while it is there, nothing else in this thread may run an event loop."""
    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=list(FLAGS))
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def daemon() -> Iterator[DaemonProcess]:
    with run_daemon(Path("demo"), *SMALL, "--allow-faults") as daemon:
        yield daemon


@dataclass
class Traffic:
    """Conversations that go on turn by turn. Mutable: each belongs to one thread."""

    url: str
    name: str
    messages: list[dict[str, str]] = field(default_factory=list)

    def turn(self) -> httpx.Response:
        """One more question and its answer; after a few turns it starts over."""
        if len(self.messages) > 10:
            self.messages.clear()
        if not self.messages:
            self.messages.append({"role": "system", "content": f"{self.name}: be brief and kind. " * 8})
        self.messages.append(
            {"role": "user", "content": f"Tell {self.name} more, for the {len(self.messages)}th time. " * 3}
        )
        body = {"model": "demo", "messages": self.messages, "max_tokens": 12}
        answer = httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=PATIENCE_SECONDS)
        answer.raise_for_status()
        content = answer.json()["choices"][0]["message"]["content"] or "-"
        self.messages.append({"role": "assistant", "content": content})
        return answer


@contextmanager
def load(url: str, guests: str, conversations: int = 3) -> Iterator[None]:
    """Conversations go on, side by side, until the block ends; other guests have other conversations."""
    done = threading.Event()
    failures: list[BaseException] = []

    def talk(name: str) -> None:
        traffic = Traffic(url, name)
        try:
            while not done.is_set():
                traffic.turn()
        except BaseException as error:  # noqa: BLE001  (raised below, in the test's own thread)
            failures.append(error)

    threads = [threading.Thread(target=talk, args=(f"{guests} {place}",)) for place in range(conversations)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        done.set()
        for thread in threads:
            thread.join()
    if failures:
        raise failures[0]


def set_faults(daemon: DaemonProcess, *faults: str) -> None:
    httpx.post(f"{daemon.url}/admin/faults", json={"faults": list(faults)}, timeout=PATIENCE_SECONDS).raise_for_status()


@dataclass
class Visit:
    """A page, and what a browser finds wrong with it."""

    page: Page
    complaints: list[str] = field(default_factory=list)
    hosts: set[str] = field(default_factory=set)

    def listen(self) -> None:
        page = self.page
        page.on("console", lambda message: message.type in ("error", "warning") and self.complain(message.text))
        page.on("pageerror", lambda error: self.complain(str(error)))
        page.on("request", lambda request: self.hosts.add(urlsplit(request.url).netloc))
        page.on("requestfailed", lambda request: self.complain(f"{request.url}: {request.failure}"))
        page.on("response", lambda answer: answer.status >= 400 and self.complain(f"{answer.url}: {answer.status}"))

    def complain(self, text: str) -> None:
        self.complaints.append(text)


@pytest.fixture(scope="module")
def context(browser: Browser) -> Iterator[BrowserContext]:
    """Somebody who comes again: what was fetched once is not fetched again."""
    context = browser.new_context(viewport=WIDE)
    context.set_default_timeout(PATIENCE_MS)
    yield context
    context.close()


@contextmanager
def visit(context: BrowserContext, url: str) -> Iterator[Visit]:
    """Open the dashboard in a tab of its own."""
    found = Visit(context.new_page())
    try:
        found.listen()
        found.page.goto(url, wait_until="domcontentloaded")
        yield found
    finally:
        found.page.close()
