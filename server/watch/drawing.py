"""Bars and sparklines out of characters, that can be told apart without colour."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

from server.watch.bodies import PoolBody


@dataclass(frozen=True, slots=True)
class Glyphs:
    """The characters of one kind of terminal."""

    pinned: str
    in_flight: str
    cached: str
    free: str
    levels: str
    """From nothing to everything."""
    dot: str


UNICODE = Glyphs("█", "▓", "▒", "·", " ▁▂▃▄▅▆▇█", "·")
ASCII = Glyphs("#", "*", "=", ".", " .:-=+*#", "-")

STATE_STYLES = {"pinned": "magenta", "in_flight": "cyan", "cached": "blue", "free": "dim"}


def pool_bar(pool: PoolBody, width: int, glyphs: Glyphs) -> Text:
    """The pool's units by state, over `width` cells; a state that holds anything shows at least one cell."""
    counts = {name: getattr(pool, name) for name in STATE_STYLES}
    bar = Text()
    for name, cells in _share_out(counts, width).items():
        bar.append(getattr(glyphs, name) * cells, STATE_STYLES[name])
    return bar


def _share_out(counts: dict[str, int], width: int) -> dict[str, int]:
    """Cells in proportion; they add up to `width`."""
    total = sum(counts.values())
    if not total:
        return {name: width if name == "free" else 0 for name in counts}
    cells = {name: max(1, count * width // total) if count else 0 for name, count in counts.items()}
    while (over := sum(cells.values()) - width) != 0:
        # What is over or missing goes to the widest: there it is seen least.
        widest = max(cells, key=lambda name: (cells[name], counts[name]))
        cells[widest] -= 1 if over > 0 else -1
    return cells


def sparkline(values: Sequence[float], most: float, glyphs: Glyphs) -> str:
    """One character for each value, against `most`; what is above 0 is never blank."""
    top = len(glyphs.levels) - 1
    return "".join(
        glyphs.levels[0 if value <= 0 or most <= 0 else min(top, max(1, round(value / most * top)))] for value in values
    )
