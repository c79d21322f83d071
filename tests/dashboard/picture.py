"""Makes docs/dashboard.png and docs/dashboard-dark.png anew: `python -m tests.dashboard.picture`.

A daemon serves the bundled model to a few conversations for a while, and the page is photographed in both themes.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Literal

from playwright.sync_api import Browser, expect, sync_playwright

from tests.dashboard.conftest import FLAGS, PATIENCE_MS, WIDE, load
from tests.e2e.conftest import run_daemon

DOCS = Path(__file__).resolve().parents[2] / "docs"
SIZES = ("--kv-cache-mib", "64", "--host-cache-mib", "64", "--device-state-slots", "16", "--max-concurrency", "4")
SHOWN_SECONDS = 300
"""Of the shortest span that the page has."""
_SETTLING_MS = 3000
"""The page asks for its figures every two seconds."""


def main() -> None:
    """Takes as long as the shortest span, so that its charts are full."""
    chromium = shutil.which("chromium")
    assert chromium is not None, "there is no chromium: apt-get install chromium"
    expect.set_options(timeout=PATIENCE_MS)
    with run_daemon(Path("demo"), *SIZES) as daemon, load(daemon.url, "Guest", conversations=3):
        time.sleep(SHOWN_SECONDS)
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium, args=list(FLAGS))
            photograph(browser, daemon.url, "light", DOCS / "dashboard.png")
            photograph(browser, daemon.url, "dark", DOCS / "dashboard-dark.png")
            browser.close()


def photograph(browser: Browser, url: str, theme: Literal["light", "dark"], path: Path) -> None:
    """As much of the page as a window shows."""
    page = browser.new_page(viewport=WIDE, color_scheme=theme)
    page.goto(url, wait_until="domcontentloaded")
    page.get_by_label("5 min", exact=True).check()
    expect(page.locator("#reuse-chart svg").first).to_be_visible()
    expect(page.locator("#speed svg").first).to_be_visible()
    page.wait_for_timeout(_SETTLING_MS)
    page.screenshot(path=path)
    page.close()


if __name__ == "__main__":
    main()
