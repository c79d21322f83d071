"""The dashboard in a browser: what an operator sees, by eye, by keyboard, by ear."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect

from tests.dashboard.conftest import NARROW, WIDE, Traffic, load, set_faults, visit

COLLAPSED = '#insights [data-key="prefix.reuse_collapsed"]'
A_NUMBER = re.compile(r"\d")


@pytest.fixture(scope="module")
def busy(daemon):
    """A daemon with a past: reuse, losses and conversations to show."""
    guests = [Traffic(daemon.url, f"regular {place}") for place in range(3)]
    for _ in range(4):
        for guest in guests:
            guest.turn()
    return daemon


@pytest.fixture
def seen(context, busy):
    """The page, which must give a browser nothing to complain of, and ask no other host."""
    with visit(context, busy.url) as visit_:
        yield visit_
        assert visit_.complaints == []
        assert visit_.hosts == {urlsplit(busy.url).netloc}


def test_every_panel_is_filled_under_load(seen, busy):
    page = seen.page
    with load(busy.url, "regular"):
        expect(page.locator("#status")).to_have_attribute("data-tone", "good")
        expect(page.locator("#status-headline")).to_have_text(
            re.compile(r"^Healthy: reuse works, \d requests? running")
        )
        expect(page.locator("#status-detail")).to_contain_text("of what could be reused was")
        expect(page.locator("#figures b")).to_have_text([A_NUMBER] * 8)
        expect(page.locator("#pools .chart")).to_have_count(4)
        expect(page.locator("#pools .plot .scatterlayer .trace")).to_have_count(16)
        expect(page.locator("#pools .legend b")).to_have_text([A_NUMBER] * 16)
        expect(page.locator("#reuse-chart .plot .scatterlayer .trace")).to_have_count(3)
        expect(page.locator("#reuse-chart .headline")).to_have_text(re.compile(r"\d+ % of the achievable"))
        expect(page.locator("#losses tbody tr").first).to_contain_text(A_NUMBER)
        expect(page.locator("#paths tbody tr").first).to_contain_text(A_NUMBER)
        expect(page.locator("#requests [data-state=running]").first).to_be_visible()
        done = page.locator("#requests tr[data-state=done]").first
        expect(done.locator("td").nth(3)).to_have_text(re.compile(r"[\d,]+ / [\d,]+"))
        expect(done.locator("td").nth(4)).to_have_text(re.compile(r"\d (ms|s)$"))
        expect(page.locator("#kept tbody tr").first).to_contain_text(A_NUMBER)


def test_a_chart_says_the_same_in_a_sentence_and_in_a_table(seen):
    chart = seen.page.locator("#pools .chart").first
    expect(chart.locator(".plot")).to_have_accessible_name(re.compile(r"Device state slots. pinned \d+, .* of \d+"))
    chart.get_by_text("As a table").click()
    expect(chart.get_by_role("row").nth(1).get_by_role("cell")).to_have_text([A_NUMBER] * 4)


def test_what_is_served_and_how_fast_it_is_are_told(seen, busy):
    page = seen.page
    expect(page.locator("#served")).to_have_text(
        re.compile(
            r"^demo \(qwen3_5, 4,096 tokens of context\) · backend torch · 2 requests at once · dalsegno .+ · up \d"
        )
    )
    with load(busy.url, "regular"):
        expect(page.locator("#speed .legend b")).to_have_text([A_NUMBER] * 6)
        expect(page.locator("#speed .headline")).to_have_text(["last 15 min"] * 3)


def test_every_share_names_its_window_and_all_have_one(seen, busy):
    page = seen.page
    page.get_by_role("radio", name="5 min", exact=True).check(force=True)
    expect(page.locator("#status-detail")).to_contain_text("In the last 5 min, ")
    expect(page.locator("#figures small")).to_have_text(
        ["requests, now"] * 2
        + ["tokens/s, last 1 s"] * 2
        + ["of the achievable, last 5 min", "of all prompt tokens, last 5 min"]
        + [re.compile(r"^median, \d+ of the newest \d+ answers?$")] * 2
    )
    expect(page.locator("#reuse-chart .headline")).to_contain_text(", last 5 min")


def test_a_fire_drill_is_told_at_the_top_and_ended_from_there(seen, busy):
    page = seen.page
    drill = page.get_by_role("region", name="A fire drill is on")
    expect(drill).to_be_hidden()
    set_faults(busy, "slow_step")
    try:
        expect(drill).to_contain_text("This daemon fails on purpose: slow_step.")
        drill.get_by_role("button", name="End the drill").click()
        page.get_by_role("dialog", name="End the drill?").get_by_role("button", name="Yes").click()
        expect(page.locator("#action-result")).to_have_text("End the drill: The drill is over.")
        expect(drill).to_be_hidden()
    finally:
        set_faults(busy)


def test_an_action_asks_once_more_and_says_what_came_of_it(seen):
    page = seen.page
    audit, result = page.get_by_role("button", name="Audit the books"), page.locator("#action-result")
    audit.click()
    question = page.get_by_role("dialog", name="Audit the books?")
    expect(question.get_by_role("button", name="No")).to_be_focused()
    page.keyboard.press("Escape")
    expect(question).to_be_hidden()
    expect(result).to_be_empty()
    audit.click()
    question.get_by_role("button", name="Yes").click()
    expect(result).to_have_text("Audit the books: The books are sound.")
    page.get_by_role("button", name="Reset host memory").click()
    page.get_by_role("dialog").get_by_role("button", name="Yes").click()
    expect(result).to_contain_text(re.compile(r"Reset host memory: \d+ checkpoints? forgotten"))


def test_a_drain_is_told_and_undone(seen):
    page = seen.page
    page.get_by_role("button", name="Drain", exact=True).click()
    page.get_by_role("dialog", name="Drain?").get_by_role("button", name="Yes").click()
    expect(page.locator("#status-headline")).to_have_text("Drained: no requests are taken")
    expect(page.locator("#figures b").first).to_have_text("0")
    page.get_by_role("button", name="Undo the drain").click()
    page.get_by_role("dialog", name="Undo the drain?").get_by_role("button", name="Yes").click()
    expect(page.locator("#status-headline")).to_contain_text("Healthy")
    expect(page.get_by_role("button", name="Undo the drain")).to_be_hidden()
    # That is what /health answers meanwhile.
    seen.complaints[:] = [each for each in seen.complaints if "503" not in each]


def test_an_insight_opens_and_clears_live(seen, busy):
    page = seen.page
    expect(page.locator("#status-headline")).to_contain_text("Healthy")
    set_faults(busy, "refuse_publish")
    try:
        with load(busy.url, "unlucky"):
            expect(page.locator(COLLAPSED)).to_be_visible()
            expect(page.locator("#status-headline")).to_contain_text("Degraded: reuse has collapsed")
    finally:
        set_faults(busy)
    card = page.locator(COLLAPSED)
    for part in (".statement", ".advice span", ".since"):
        expect(card.locator(part)).not_to_be_empty()
    expect(card.locator("code").first).to_contain_text(f"curl -X POST {busy.url}/admin/")
    expect(card.locator("dd").first).to_have_text(A_NUMBER)
    expect(page.get_by_role("log")).to_contain_text(card.get_by_role("heading").inner_text())
    with load(busy.url, "lucky"):
        expect(card).to_have_count(0)
    expect(page.locator("#cleared")).to_contain_text("cleared after")
    expect(page.locator("#status-headline")).to_contain_text("Healthy")


def test_one_request_tells_why_it_was_slow(seen, busy):
    page = seen.page
    request_id = Traffic(busy.url, "curious").turn().headers["x-request-id"]
    link = page.locator(f'#requests a[href="#request/{request_id}"]')
    link.click()
    view = page.get_by_role("dialog", name="Why was this slow?")
    expect(view).to_contain_text(request_id)
    expect(view.locator(".explanation li").first).to_have_text(A_NUMBER)
    for phase in ("waited in the queue", "computed the prompt", "wrote the answer"):
        expect(view.get_by_role("row", name=phase)).to_contain_text(re.compile(r"\d (ms|s)"))
    expect(view.get_by_role("row", name="computed: never seen before")).to_contain_text("tokens")
    assert page.url.endswith(f"#request/{request_id}")
    page.keyboard.press("Escape")
    expect(view).to_be_hidden()
    expect(link).to_be_focused()
    assert "#request" not in page.url


def test_the_address_of_a_request_can_be_passed_on(context, busy):
    request_id = Traffic(busy.url, "friend").turn().headers["x-request-id"]
    with visit(context, f"{busy.url}/#request/{request_id}") as friend:
        expect(friend.page.get_by_role("dialog")).to_contain_text(request_id)
        expect(friend.page.locator("#why .stack").first).to_be_visible()


def test_the_keyboard_reaches_every_control(seen):
    page = seen.page
    expect(page.locator("#requests a").first).to_be_visible()
    expect(page.locator("#pools summary")).to_have_count(4)
    controls = page.evaluate(
        """() => [...document.querySelectorAll("a[href], button, input, select, summary, [tabindex='0']")]
        .filter((each) => each.checkVisibility() && !each.closest("tbody"))
        .filter((each) => each.type !== "radio" || each.checked)
        .map((each) => each.outerHTML.slice(0, 80))"""
    )
    reached = []
    while len(reached) < len(controls) + 120 and not set(controls) <= set(reached):
        page.keyboard.press("Tab")
        name, outline = page.evaluate(
            "[document.activeElement.outerHTML.slice(0, 80), getComputedStyle(document.activeElement).outlineStyle]"
        )
        reached.append(name)
        # A radio's outline is around its words; the body is where the way begins anew.
        assert outline in ("solid", "auto") or name.startswith(("<input", "<body")), name
    assert set(controls) <= set(reached)
    page.get_by_role("radio", name="15 min").focus()
    page.keyboard.press("ArrowLeft")
    expect(page.get_by_role("radio", name="5 min", exact=True)).to_be_checked()
    page.locator("#requests a").first.focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Close")).to_be_focused()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
def test_nothing_hinders_people_with_disabilities(seen, scheme, size):
    page = seen.page
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size(size)
    expect(page.locator("#pools .plot .main-svg").first).to_be_attached()
    expect(page.locator("#requests a").first).to_be_visible()
    assert _violations(page) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]
    page.locator("#requests a").last.click()
    expect(page.locator("#why .stack").first).to_be_visible()
    assert _violations(page, "#why") == []


def test_nothing_moves_for_those_who_asked_for_that(seen):
    seen.page.emulate_media(reduced_motion="reduce")
    moving = """() => [...document.querySelectorAll("*")].filter((each) => {
        const { transitionDuration, animationName } = getComputedStyle(each);
        return transitionDuration.split(", ").some((time) => parseFloat(time) > 0) || animationName !== "none";
    }).map((each) => each.outerHTML.slice(0, 80))"""
    assert seen.page.evaluate(moving) == []


def _violations(page, within=None):
    found = Axe().run(page, within, options={"resultTypes": ["violations"]}).response["violations"]
    return [(each["id"], [node["html"][:200] for node in each["nodes"]]) for each in found]


PIECES = {
    "whole": ["event: insights\ndata: {}\n\n"],
    "cut in a line and in a line end": ["event: insi", "ghts\r", "\nda", "ta: {}\r", "\n\r", "\n"],
    "after a comment": [": still here\n\n", "event: insights\ndata: {}\n\n"],
    "with more than one line": ["event: insights\ndata: {\ndata: }\n\n"],
}


def test_events_are_read_however_they_are_cut(seen):
    parse = """async (cases) => {
        const { EventParser } = await import("/dashboard/stream.js");
        return cases.map((pieces) => {
            const parser = new EventParser();
            const events = pieces.flatMap((piece) => parser.push(piece));
            return events.map(({ name, data }) => [name, data.replace("\\n", "")]);
        });
    }"""
    assert seen.page.evaluate(parse, list(PIECES.values())) == [[["insights", "{}"]]] * len(PIECES)
