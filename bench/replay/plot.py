"""A simulation as a picture: reuse over time, the pools over time, and what was lost."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from bench.replay.measure import Measurements
from bench.replay.summary import HOUR_SECONDS, Summary, windows
from engine.errors import UnusableOptionError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WINDOW_SECONDS = 600.0
_STATES = (("pinned", "#c44e52"), ("in_flight", "#dd8452"), ("cached", "#4c72b0"), ("free", "#e5e5e5"))


def require_matplotlib() -> None:
    """Raises UnusableOptionError where there is no matplotlib: ask before the long work."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UnusableOptionError(
            "--plot needs matplotlib, which is not installed: pip install 'dalsegno[bench]', or leave --plot out"
        )


def plot(title: str, measurements: Measurements, summary: Summary, path: Path) -> None:
    """Write a PNG there."""
    from matplotlib.figure import Figure

    pools = list(measurements.samples[-1].pools) if measurements.samples else []
    figure = Figure(figsize=(11, 3.0 * (len(pools) + 2)), layout="constrained")
    axes = figure.subplots(len(pools) + 2, 1, squeeze=False)[:, 0]
    figure.suptitle(title)
    _plot_reuse(axes[0], measurements)
    for axis, pool in zip(axes[1:-1], pools, strict=True):
        _plot_pool(axis, measurements, pool)
    _plot_losses(axes[-1], summary)
    figure.savefig(path, format="png", dpi=100)


def _plot_reuse(axis: Axes, measurements: Measurements) -> None:
    found = windows(measurements.served, _WINDOW_SECONDS)
    hours = [(number + 0.5) * _WINDOW_SECONDS / HOUR_SECONDS for number in range(len(found))]
    axis.plot(hours, [100 * each.hit_rate for each in found], label="token hit rate", color="#4c72b0")
    achievable = [100 * each.achievable_tokens / each.prompt_tokens if each.prompt_tokens else 0.0 for each in found]
    axis.plot(hours, achievable, label="achievable", color="#8c8c8c", linestyle="--")
    axis.set_ylim(0, 100)
    axis.set_ylabel("% of prompt tokens")
    axis.set_xlabel("virtual hours")
    axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _plot_pool(axis: Axes, measurements: Measurements, pool: str) -> None:
    counts = [sample.pools[pool] for sample in measurements.samples]
    hours = [sample.at / HOUR_SECONDS for sample in measurements.samples]
    layers = [[getattr(each, state) for each in counts] for state, _ in _STATES]
    axis.stackplot(hours, layers, labels=[state for state, _ in _STATES], colors=[color for _, color in _STATES])
    axis.set_ylim(0, max(counts[-1].capacity, 1))
    axis.set_ylabel(pool)
    axis.set_xlabel("virtual hours")
    axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _plot_losses(axis: Axes, summary: Summary) -> None:
    reasons = list(reversed(summary.lost_tokens.items()))
    axis.barh([reason for reason, _ in reasons], [tokens / 1e6 for _, tokens in reasons], color="#dd8452")
    axis.set_xlabel("million prompt tokens computed again, or for the first time, by reason")
