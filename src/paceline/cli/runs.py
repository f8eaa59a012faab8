"""`paceline runs` and `paceline report`: what they take. What they do is loaded when they run.

`paceline runs` and `paceline report`: what there is, and what it says.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli.console import output
from paceline.errors import DataError
from paceline.report.html_page import render_page, write_report
from paceline.report.run_facts import RunFacts, collect_facts, format_duration, format_number
from paceline.report.run_files import REPORT, RUNS, find_runs
from paceline.report.run_reader import RecordedRun, read_run
from paceline.report.summary_sentences import summarize_run

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def runs(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(help="Run folders, or folders of them. Default: runs/.", show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List runs, the oldest first."""

    list_runs(folders, as_json=as_json)


def report(
    run: Annotated[
        list[Path], typer.Argument(help="One run folder, or several to compare.", show_default=False)
    ],
    to: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Where the page goes. Default: RUN/report.html, report.html."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write one page about a run, or about several side by side, and say in words what is on it."""

    write_page(run, to, as_json=as_json)


def list_runs(folders: list[Path] | None, *, as_json: bool) -> None:
    """A line for each run, or JSON."""
    wanted = folders or [RUNS]
    found = [read_run(path) for path in find_runs(wanted if folders or RUNS.is_dir() else [])]
    if as_json:
        output().print_json(json.dumps([_record(run) for run in found]))
        return
    if not found:
        output().print(f"no runs in {', '.join(map(str, wanted))}", markup=False, highlight=False)
        return
    head = ["run", "status", "started", "ranks", "steps", "loss", "held-out", "speed", "time"]
    rows = [head, *(_row(run, collect_facts(run)) for run in found)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    for row in rows:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        output().print(line, markup=False, highlight=False, soft_wrap=True)


def write_page(run: list[Path], to: Path | None, *, as_json: bool) -> None:
    """One page about them, and its words."""
    found = [read_run(path) for path in run]
    path, refusal = _write_page(found, to)
    if as_json:
        page = None if refusal else str(path)
        output().print_json(json.dumps({"page": page, "runs": [_record(one) for one in found]}))
    else:
        for one in found:
            for line in ([f"{one.name}:"] if len(found) > 1 else []) + summarize_run(one):
                output().print(line, markup=False, highlight=False, soft_wrap=True)
    if refusal is not None:
        raise refusal
    if not as_json:
        output().print(f"page: {path}", markup=False, highlight=False, soft_wrap=True)


def _write_page(found: list[RecordedRun], to: Path | None) -> tuple[Path, DataError | None]:
    """Where the page goes, and why it cannot be written there."""
    path = to or (found[0].folder / REPORT if len(found) == 1 else Path(REPORT))
    try:
        if to is None and len(found) == 1:
            return write_report(found[0].folder), None
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(render_page(found, path.parent), encoding="utf-8")
    except OSError as error:
        what = f"the page cannot be written: {error.strerror or error}"
        return path, DataError(what, where=str(path), next_step="choose another place: -o FILE")
    return path, None


def _record(run: RecordedRun) -> dict[str, Any]:
    return {"run": str(run.folder), **_without_nan(asdict(collect_facts(run))), "summary": summarize_run(run)}


def _without_nan(values: dict[str, Any]) -> dict[str, Any]:
    """JSON has no NaN."""
    found = json.loads(json.dumps(values), parse_constant=str)
    return dict(found)


def _row(run: RecordedRun, found: RunFacts) -> list[str]:
    begun = f"{datetime.fromtimestamp(found.started):%Y-%m-%d %H:%M}" if found.started is not None else "–"
    return [
        str(run.folder),
        found.status,
        begun,
        str(found.ranks or "–"),
        f"{found.steps}/{found.num_steps}" if found.num_steps else str(found.steps),
        format_number(found.loss),
        format_number(found.held_out),
        "–" if found.rate is None else f"{format_number(found.rate, 3)} {found.rate_unit}",
        format_duration(found.seconds),
    ]
