"""`dalsegno replay`: a trace through the real cache under a virtual clock, and policies side by side."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ops.log import configure_logging
from server.configuration import ConfigurationError

if TYPE_CHECKING:
    from bench.replay.cost_model import CostModel
    from bench.replay.requests import Trace
    from bench.replay.sizes import Sizes

_SIZES = "pools, as those of serve"
_TRAFFIC = "traffic without a trace"
_COMPARISON = "policies side by side"


def replay(
    trace: Annotated[
        Path | None, typer.Argument(help="JSON lines, see docs/replay.md; agentic traffic when left out")
    ] = None,
    preset: Annotated[str, typer.Option(help="what the model costs: a name or a TOML file")] = "27b-hybrid",
    stretch: Annotated[float, typer.Option(min=1e-3, help="multiply the time between the trace's requests")] = 1.0,
    hours: Annotated[float, typer.Option(min=1e-3, help="virtual hours", rich_help_panel=_TRAFFIC)] = 8.0,
    sessions: Annotated[
        int, typer.Option(min=1, help="conversations alive at any time", rich_help_panel=_TRAFFIC)
    ] = 120,
    seed: Annotated[int, typer.Option(help="the same seed asks the same", rich_help_panel=_TRAFFIC)] = 0,
    write_trace: Annotated[
        Path | None, typer.Option(help="write the traffic as a trace", metavar="FILE", rich_help_panel=_TRAFFIC)
    ] = None,
    max_concurrency: Annotated[int, typer.Option(min=1, help="running requests", rich_help_panel=_SIZES)] = 8,
    device_state_slots: Annotated[
        int, typer.Option(min=0, help="checkpoints on the device", rich_help_panel=_SIZES)
    ] = 16,
    host_state_slots: Annotated[
        int, typer.Option(min=0, help="most state images in host memory", rich_help_panel=_SIZES)
    ] = 24,
    host_cache_mib: Annotated[
        int, typer.Option(min=0, help="host memory for KV and state together", rich_help_panel=_SIZES)
    ] = 32_768,
    kv_pages: Annotated[int, typer.Option(min=1, help="device KV pages", rich_help_panel=_SIZES)] = 13_312,
    page_size: Annotated[int, typer.Option(min=1, help="tokens in a page", rich_help_panel=_SIZES)] = 64,
    compare: Annotated[
        bool, typer.Option("--compare", help="KV unlimited, only --slots states", rich_help_panel=_COMPARISON)
    ] = False,
    slots: Annotated[
        str | None,
        typer.Option(help="numbers of states, such as 40,160 or DEVICE+HOST", rich_help_panel=_COMPARISON),
    ] = None,
    report_from: Annotated[
        float,
        typer.Option(min=0, max=0.99, help="share of the trace that only warms up", rich_help_panel=_COMPARISON),
    ] = 0.5,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="draw it as a PNG", metavar="FILE")] = None,
    json_file: Annotated[
        str | None, typer.Option("--json", help="write the figures there; - is standard output", metavar="FILE")
    ] = None,
) -> None:
    """Serve a trace with the real cache and no model: hit rate, losses, time to first token, bytes moved."""
    from bench.replay.cost_model import load_preset
    from bench.replay.sizes import Sizes

    configure_logging("info", "console")
    model = load_preset(preset)
    sizes = Sizes(
        max_concurrency=max_concurrency,
        device_state_slots=device_state_slots,
        host_state_slots=host_state_slots,
        host_cache_mib=host_cache_mib,
        kv_pages=kv_pages,
        page_tokens=page_size,
    )
    if plot_file is not None:
        from bench.replay.plot import require_matplotlib

        require_matplotlib()
    if not compare and slots is not None:
        raise ConfigurationError("--slots was given without --compare; pools are set with --device-state-slots")
    if compare and plot_file is not None:
        raise ConfigurationError("--plot and --compare were both given; a comparison is a table only")
    requests = _trace(trace, stretch, hours, sessions, seed, write_trace)
    if compare:
        _compare(requests, model, slots, report_from, json_file)
        return
    _simulate(requests, model, sizes, plot_file, json_file)


def _trace(
    path: Path | None, stretch: float, hours: float, sessions: int, seed: int, write_trace: Path | None
) -> Trace:
    from bench.replay.agentic import Traffic, make_calls
    from bench.replay.conversations import ConversationTrace, write_conversations
    from bench.replay.readers import read_trace

    if path is not None:
        if write_trace is not None:
            raise ConfigurationError("--write-trace and a trace were both given; there is one already")
        return read_trace(path, stretch)
    calls = make_calls(Traffic(sessions, hours, seed))
    if not calls:
        raise ConfigurationError(f"nobody asks anything in {hours:g} hours of {sessions} sessions; raise --hours")
    if write_trace is not None:
        write_conversations(write_trace, calls)
    return ConversationTrace(f"agentic traffic, seed {seed}, {sessions} sessions", calls)


def _simulate(trace: Trace, model: CostModel, sizes: Sizes, plot_file: Path | None, json_file: str | None) -> None:
    from bench.replay.measure import Measurements
    from bench.replay.simulation import Simulation
    from bench.replay.summary import summarise
    from bench.replay.tables import render
    from engine.progress import track

    measurements = Measurements()
    simulation = Simulation(trace, model, sizes, measurements)
    title = f"{trace.name}: {model.title}"
    try:
        with track("serving", len(trace), unit="requests") as advance:
            simulation.run(advance)
    finally:
        # Also after Ctrl-C: what was served so far is worth a look.
        if measurements.served:
            summary = summarise(measurements, simulation.cache)
            _show(render(title, summary), json_file)
            _write_json(json_file, {"trace": trace.name, "sizes": asdict(sizes), "summary": asdict(summary)})
            if plot_file is not None:
                from bench.replay.plot import plot

                plot(title, measurements, summary, plot_file)


def _compare(trace: Trace, model: CostModel, slots: str | None, report_from: float, json_file: str | None) -> None:
    from bench.replay.compare import Comparison, parse_slots, render, usual_slots
    from engine.progress import track

    wanted = parse_slots(slots) if slots is not None else usual_slots(trace)
    comparison = Comparison(trace, model, wanted, report_from)
    with track("comparing", len(comparison), unit="requests") as advance:
        comparison.run(advance)
    outcomes = comparison.outcomes()
    title = f"{trace.name}: the last {1 - report_from:.0%} of {len(trace):,} requests"
    _show(render(title, outcomes), json_file)
    _write_json(json_file, {"trace": trace.name, "outcomes": [asdict(outcome) for outcome in outcomes]})


def _show(what: Any, json_file: str | None) -> None:
    from rich.console import Console

    Console(highlight=False, stderr=json_file == "-").print(what)


def _write_json(json_file: str | None, record: dict[str, Any]) -> None:
    text = json.dumps(record, indent=2) + "\n"
    if json_file == "-":
        sys.stdout.write(text)
    elif json_file is not None:
        Path(json_file).write_text(text, encoding="utf-8")
