"""The table of `paceline top`: a row for each run, and under it a row for each of its ranks."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from paceline.observe.terminal_text import escape_controls
from paceline.report.number_format import format_bytes, format_duration, format_number

_STYLES = {"running": "cyan", "finished": "green", "failed": "red", "lost": "red", "stopped": "yellow"}
_SILENT_SECONDS = 30.0


def render_table(states: Sequence[Mapping[str, Any]]) -> Table:
    """Return the table of some states of runs, see `RunWatch.state`."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("run", overflow="ellipsis", no_wrap=True)
    table.add_column("status", no_wrap=True)
    for name in ("step", "loss", "speed", "round", "data", "comp", "wait", "peak"):
        table.add_column(name, justify="right", no_wrap=True)
    for state in states:
        table.add_row(*_run_cells(state))
        for rank in state["ranks"] if state["status"] in ("running", "unknown") else ():
            table.add_row(*_rank_cells(rank), style="dim")
    if not states:
        table.add_row("no runs yet")
    return table


def _run_cells(state: Mapping[str, Any]) -> list[str | Text]:
    status = state["status"]
    silent_seconds = time.time() - state["updated"] if state["updated"] else 0.0
    if status == "running" and silent_seconds > max(_SILENT_SECONDS, 20 * (state["step_seconds"] or 0.0)):
        status = f"silent for {format_duration(silent_seconds)}"
    speed, seconds = state["samples_per_second"], state["step_seconds"]
    return [
        escape_controls(state["name"]),
        Text(status, style=_STYLES.get(status, "yellow")),
        f"{state['steps_done']}/{state['num_steps']}",
        _format(state["loss"]),
        f"{_format(speed)}/s" if speed is not None else "",
        format_duration(seconds) if seconds is not None and math.isfinite(seconds) else "",
    ]


def _rank_cells(rank: Mapping[str, Any]) -> list[str]:
    shares = rank["shares"]
    compute = shares["forward"] + shares["backward"] + shares["optimizer"]
    return [
        f"  rank {rank['rank']}",
        "",
        str(rank["step"] + 1),
        "",
        "",
        format_duration(rank["round_seconds"]),
        f"{shares['data']:.0%}",
        f"{compute:.0%}",
        f"{shares['waiting']:.0%}",
        format_bytes(rank["peak_bytes"]),
    ]


def _format(value: float | None) -> str:
    return "" if value is None else format_number(value) if math.isfinite(value) else str(value)
