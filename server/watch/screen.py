"""One page about a daemon, for a terminal of any size or for a file."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from ops.explanation import in_words
from server.watch.bodies import InsightBody
from server.watch.drawing import ASCII, UNICODE, Glyphs, pool_bar, sparkline
from server.watch.view import Point, RequestRow, Reuse, Watch, by_time

_WIDE_COLUMNS = 132
_ROOMY_LINES = 36
_MOST_BAR = 60
_POOL_FIGURES = 40
_LABEL_COLUMNS = 20
_MOST_ID = 40
_REQUEST_FIGURES = 66
_LEAST_REQUEST_LINES = 4
_MOST_STATUS_LINES = 3
_LISTED_REQUESTS = 10
"""Where there is no height to fill."""

_BADGE_STYLES = {"HEALTHY": "bold green", "DEGRADED": "bold yellow", "STARTING": "bold cyan", "DRAINING": "bold cyan"}
_REUSE_WORDS = {"collapsed": "reuse has collapsed"}
_SERVING = ("ok", "degraded")
_SEVERITY_MARKS = {"critical": ("!!", "bold red"), "warning": ("!", "bold yellow"), "notice": ("*", "bold cyan")}
_OUTCOME_STYLES = {"running": "cyan", "error": "red", "overloaded": "yellow", "bad_request": "yellow"}


@dataclass(frozen=True, slots=True)
class Screen:
    """Everything known of one daemon at a moment."""

    watch: Watch
    url: str
    trouble: str = ""
    """Why the daemon does not answer now; empty while it does."""
    fits_window: bool = False
    """Whether to fill the terminal's height and no more; else it takes what it needs."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        page = _Page(self, console, options)
        yield Group(*page.parts())


class _Page:
    """The parts of one page in the order in which they are shown."""

    def __init__(self, screen: Screen, console: Console, options: ConsoleOptions) -> None:
        self._screen = screen
        self._watch = screen.watch
        self._console = console
        self._width = options.max_width
        self._height = options.size.height if screen.fits_window else None
        self._glyphs: Glyphs = ASCII if options.ascii_only else UNICODE

    def parts(self) -> Iterator[RenderableType]:
        head = self._head()
        middle = self._middle()
        hints = self._hints()
        insights = self._insights()
        gap = [Text()] if self._height is None or self._height >= _ROOMY_LINES else []
        rows = _LISTED_REQUESTS
        if self._height is not None:
            fixed = sum(map(self._lines_of, (*head, *middle, *hints, *gap, *gap, *gap)))
            left = self._height - fixed
            insights = self._cut(insights, max(2, left - _LEAST_REQUEST_LINES))
            rows = left - sum(map(self._lines_of, insights)) - 1
        yield from (*head, *gap, *insights, *gap, *middle, *gap)
        yield from self._requests(rows)
        yield from hints

    # -- top

    def _head(self) -> list[RenderableType]:
        badge, words = self._status()
        first = Text.assemble((f" {badge} ", f"{_BADGE_STYLES.get(badge, 'bold red')} reverse"), "  ", words)
        lines = [_whole(line) for line in first.wrap(self._console, self._width)]
        return [*lines[:_MOST_STATUS_LINES], self._second_line()]

    def _status(self) -> tuple[str, str]:
        reading = self._watch.reading
        if self._screen.trouble:
            seen = f"; last seen {_clock(reading.read_unix_ms)}, shown below" if reading else ""
            return "NO ANSWER", f"{self._screen.trouble}; trying again{seen}"
        if reading is None:
            return "ASKING", "no answer yet"
        health = reading.health
        reasons = "; ".join(health.reasons)
        reuse = "" if health.reuse is None else _REUSE_WORDS.get(health.reuse, f"reuse is {health.reuse}")
        if health.status == "ok":
            return "HEALTHY", ", ".join(part for part in ("serving", reuse) if part)
        if health.status == "degraded":
            said = ", ".join(part for part in ("serving", reuse) if part)
            return "DEGRADED", f"{said}: {reasons}" if reasons else said
        return health.status.upper(), reasons or "not serving"

    def _second_line(self) -> Text:
        reading, model = self._watch.reading, self._watch.model()
        facts = [f"{model} at {self._screen.url}" if model else self._screen.url]
        queue = self._watch.running_and_waiting()
        if queue is not None:
            facts.append(f"{queue[0]:,} running, {queue[1]:,} waiting")
        if reading is not None:
            facts.append(_clock(reading.read_unix_ms))
        return _whole(Text(f" {self._glyphs.dot} ".join(facts), "dim"))

    def _insights(self) -> list[RenderableType]:
        reading = self._watch.reading
        if reading is None:
            return []
        if reading.insights is None:
            return []
        if not reading.insights.insights:
            return [Text("no insights: nothing to report", "dim")]
        order = [*_SEVERITY_MARKS, "info"]
        worst_first = sorted(
            reading.insights.insights,
            key=lambda insight: order.index(insight.severity) if insight.severity in order else len(order),
        )
        return [line for insight in worst_first for line in self._insight(insight)]

    def _insight(self, insight: InsightBody) -> Iterator[Text]:
        mark, style = _SEVERITY_MARKS.get(insight.severity, ("i", "bold"))
        since = f" (since {_clock(insight.since_unix_ms)})" if insight.since_unix_ms else ""
        title = Text.assemble((f"{mark} {insight.title}", style), (f"  {insight.id}{since}", "dim"))
        yield _whole(title)
        advice = [f"What to do: {insight.recommendation}"] if insight.recommendation else []
        for text in (insight.statement, *advice):
            for line in Text(text).wrap(self._console, max(20, self._width - 3)) if text else ():
                yield _whole(Text.assemble("   ", line))

    @staticmethod
    def _cut(lines: list[RenderableType], most: int) -> list[RenderableType]:
        if len(lines) <= most:
            return lines
        return [
            *lines[: most - 1],
            Text(f"   (and {len(lines) - most + 1} lines more: a taller window, or --once)", "dim"),
        ]

    # -- middle

    def _middle(self) -> list[RenderableType]:
        if self._width < _WIDE_COLUMNS:
            return [*self._pools(self._width), *self._reuse(self._width)]
        half = (self._width - 3) // 2
        beside = Table.grid(padding=(0, 3, 0, 0))
        beside.add_column(width=half)
        beside.add_column(width=half)
        beside.add_row(Group(*self._pools(half)), Group(*self._reuse(half)))
        return [beside]

    def _pools(self, width: int) -> Iterator[RenderableType]:
        pools = self._watch.pools()
        if not pools:
            return
        glyphs = self._glyphs
        bar = max(6, min(_MOST_BAR, width - _LABEL_COLUMNS - _POOL_FIGURES))
        table = Table.grid()
        table.add_column(width=_LABEL_COLUMNS, no_wrap=True)
        table.add_column(width=bar, no_wrap=True)
        for columns in (10, 12, 10, 8):
            table.add_column(width=columns, justify="right", no_wrap=True)
        legend = ((glyphs.pinned, "pinned"), (glyphs.in_flight, "in flight"), (glyphs.cached, "cached"))
        names = [f"{glyph} {name}" for glyph, name in (*legend, (glyphs.free, "free"))]
        table.add_row("pools", "", *names, style="dim")
        for name, pool in pools.items():
            counts = (pool.pinned, pool.in_flight, pool.cached, pool.free)
            figures = [Text(f"{count:,}") for count in counts]
            table.add_row(Text(name.replace("_", " ")), pool_bar(pool, bar, glyphs), *figures)
        yield table

    def _reuse(self, width: int) -> Iterator[RenderableType]:
        reuse = self._watch.reuse()
        if reuse is None:
            return
        table = Table.grid(padding=(0, 1, 0, 0))
        line_columns = max(8, min(_MOST_BAR, width - 12 - 12 - 33))
        for columns, justify in ((11, "left"), (11, "right"), (line_columns, "left")):
            table.add_column(width=columns, justify=justify, no_wrap=True)  # type: ignore[arg-type]
        table.add_column(no_wrap=True, overflow="ellipsis", max_width=max(10, width - 25 - line_columns))
        table.add_row("reuse", "tokens", Text(reuse.span), "", style="dim")
        achieved, expected, achievable = reuse.achieved_tokens, reuse.expected_tokens, reuse.achievable_tokens
        points = reuse.points
        rows: list[tuple[str, int, list[int], str]] = [
            ("reused", achieved, [point.achieved_tokens for point in points], _share(achieved, achievable)),
        ]
        if expected is not None:
            known = [point.expected_tokens or 0 for point in points]
            rows.append(("expected", expected, known, "by a sound cache of this size"))
        wanted = [point.achievable_tokens for point in points]
        rows.append(("achievable", achievable, wanted, "with endless memory"))
        generated = [point.generated_tokens for point in points]
        rows.append(("generated", sum(generated), generated, self._speed(reuse)))
        most = max(max(self._course(reuse, row[2], line_columns), default=0) for row in rows[:-1])
        for name, total, values, note in rows:
            course = self._course(reuse, values, line_columns)
            scale = most if name != "generated" else max(course, default=0)
            line = sparkline(course, scale, self._glyphs) if reuse.has_course else ""
            table.add_row(name, f"{total:,}", Text(line, "green" if name == "reused" else ""), Text(note, "dim"))
        yield table
        yield self._counts("lost", reuse.lost, "nothing")
        yield self._counts("paths", reuse.paths, "no requests")

    def _course(self, reuse: Reuse, values: list[int], columns: int) -> list[float]:
        assert self._watch.reading is not None
        return by_time(reuse.points, values, columns, self._watch.reading.read_unix_ms)

    @staticmethod
    def _speed(reuse: Reuse) -> str:
        latest: list[Point] = list(reuse.points[-2:])
        if not reuse.has_course or len(latest) < 2:
            return "tokens"
        seconds = (latest[1].at_unix_ms - latest[0].at_unix_ms) / 1000
        return f"{latest[1].generated_tokens / seconds:,.0f} tokens/s" if seconds > 0 else "tokens"

    @staticmethod
    def _counts(name: str, counts: dict[str, int], none: str) -> Text:
        told = ", ".join(f"{what} {count:,}" for what, count in counts.items()) or none
        return _whole(Text.assemble(f"{name:<12}", (told, "" if counts else "dim")))

    # -- bottom

    def _requests(self, most: int) -> Iterator[RenderableType]:
        rows = self._watch.requests()
        if rows is None or most < 1:
            return
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
        width = max(8, min(_MOST_ID, self._width - _REQUEST_FIGURES))
        table.add_column("last requests", no_wrap=True, overflow="ellipsis", width=width)
        table.add_column("path", no_wrap=True, overflow="ellipsis", max_width=20)
        for name in ("cached/prompt", "TTFT", "tok/s"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("outcome", no_wrap=True)
        if self._width >= _WIDE_COLUMNS:
            table.add_column("most of what was lost", no_wrap=True, overflow="ellipsis", max_width=30)
        for row in rows[:most]:
            table.add_row(*_cells(row)[: len(table.columns)])
        if not rows:
            table.add_row(Text("none yet", "dim"))
        yield table

    def _hints(self) -> list[RenderableType]:
        reading = self._watch.reading
        if reading is None or reading.health.status not in _SERVING:
            return []  # doors are closed because it does not serve
        hints = []
        if reading.closed:
            admin = [path for path in reading.closed if path.startswith("/admin/")]
            others = [path for path in reading.closed if path not in admin]
            if others:
                hints.append(f"{' and '.join(others)} closed: --api-key KEY opens it")
            if admin:
                hints.append("/admin closed: --admin-key KEY shows requests and the last minutes")
        hints += [f"{path} {why}" for path, why in reading.missing.items()]
        return [_whole(Text(hint, "dim")) for hint in hints]

    def _lines_of(self, part: RenderableType) -> int:
        return len(self._console.render_lines(part, self._console.options.update(width=self._width, height=None)))


def _cells(row: RequestRow) -> tuple[Text, ...]:
    cached = "" if row.prompt_tokens is None else f"{row.cached_tokens or 0:,}/{row.prompt_tokens:,}"
    return (
        Text(row.request_id),
        Text(row.path),
        Text(cached),
        Text("" if row.ttft_seconds is None else in_words(row.ttft_seconds)),
        Text("" if row.tokens_per_second is None else f"{row.tokens_per_second:,.0f}"),
        Text(row.outcome, _OUTCOME_STYLES.get(row.outcome.partition(" ")[0], "")),
        Text(row.lost),
    )


def _share(achieved: int, achievable: int) -> str:
    return f"{100 * achieved / achievable:.0f} % of achievable" if achievable else "nothing could be"


def _whole(line: Text) -> Text:
    """On one line, whatever its length."""
    line.no_wrap, line.overflow = True, "ellipsis"
    return line


def _clock(unix_ms: int) -> str:
    return time.strftime("%H:%M:%S", time.localtime(unix_ms / 1000))
