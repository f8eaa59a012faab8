"""`paceline runs` and `paceline report`: list run folders, and write a page about some of them."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.console import print_json, print_plain
from paceline.errors import DataError

if TYPE_CHECKING:
    from paceline.report.run_reader import RecordedRun

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def runs(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(help="Run folders, or folders that contain some. Default: runs/.", show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List runs, oldest first."""
    list_runs(folders, as_json=as_json)


def report(
    run: Annotated[
        list[Path], typer.Argument(help="One run folder, or several to compare.", show_default=False)
    ],
    to: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="File of the page. Default: RUN/report.html; report.html for several runs."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write an HTML page about one run, or about several to compare, and print a summary."""
    write_page(run, to, as_json=as_json)


def list_runs(folders: list[Path] | None, *, as_json: bool) -> None:
    """Print a line for each run, or JSON."""
    from paceline.report.run_files import RUNS, find_runs
    from paceline.report.run_reader import read_run

    wanted = folders or [RUNS]
    # Without runs/ there are no runs yet, but a folder that the user names has to exist.
    recorded = [read_run(path) for path in find_runs(wanted if folders or RUNS.is_dir() else [])]
    if as_json:
        print_json([_record(run) for run in recorded])
        return
    if not recorded:
        print_plain(f"no runs in {', '.join(map(str, wanted))}")
        return
    head = ["run", "status", "started", "ranks", "steps", "loss", "held-out", "speed", "time"]
    rows = [head, *(_row(run) for run in recorded)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    for row in rows:
        print_plain("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def write_page(folders: list[Path], to: Path | None, *, as_json: bool) -> None:
    """Write one page about some runs, and print their summaries.

    Raises:
        DataError: the page cannot be written; raised after the summaries have been printed.
    """
    from paceline.report.run_reader import read_run
    from paceline.report.summary_sentences import summarize_run

    recorded = [read_run(path) for path in folders]
    path, refusal = _write_page(recorded, to)
    if as_json:
        page = None if refusal else str(path)
        print_json({"page": page, "runs": [_record(run) for run in recorded]})
    else:
        for run in recorded:
            for line in ([f"{run.name}:"] if len(recorded) > 1 else []) + summarize_run(run):
                print_plain(line)
    if refusal is not None:
        raise refusal
    if not as_json:
        print_plain(f"page: {path}")


def _write_page(recorded: list[RecordedRun], to: Path | None) -> tuple[Path, DataError | None]:
    """Write the page; returns its path, and the error if it cannot be written there."""
    from paceline.report.html_page import render_page, write_report
    from paceline.report.run_files import REPORT

    path = to or (recorded[0].folder / REPORT if len(recorded) == 1 else Path(REPORT))
    try:
        if to is None and len(recorded) == 1:
            return write_report(recorded[0].folder), None
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(render_page(recorded, path.parent), encoding="utf-8")
    except OSError as error:
        what = f"cannot write the page: {error.strerror or error}"
        return path, DataError(what, where=str(path), next_step="choose another file: -o FILE")
    return path, None


def _record(run: RecordedRun) -> dict[str, Any]:
    from paceline.report.run_facts import collect_facts
    from paceline.report.summary_sentences import summarize_run

    # JSON has no NaN, so NaN and infinity become strings
    facts: dict[str, Any] = json.loads(json.dumps(asdict(collect_facts(run))), parse_constant=str)
    return {"run": str(run.folder), **facts, "summary": summarize_run(run)}


def _row(run: RecordedRun) -> list[str]:
    from paceline.report.number_format import format_duration, format_number
    from paceline.report.run_facts import collect_facts

    facts = collect_facts(run)
    started = f"{datetime.fromtimestamp(facts.started):%Y-%m-%d %H:%M}" if facts.started is not None else "–"
    return [
        str(run.folder),
        facts.status,
        started,
        str(facts.ranks or "–"),
        f"{facts.steps}/{facts.num_steps}" if facts.num_steps else str(facts.steps),
        format_number(facts.loss),
        format_number(facts.held_out),
        "–" if facts.rate is None else f"{format_number(facts.rate, 3)} {facts.rate_unit}",
        format_duration(facts.seconds),
    ]
