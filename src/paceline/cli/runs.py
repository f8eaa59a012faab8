"""`paceline runs` and `paceline report`: what they take. What they do is loaded when they run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def runs(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(help="Run folders, or folders of them. Default: runs/.", show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List runs, the oldest first."""
    from paceline.cli.runs_job import list_runs

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
    from paceline.cli.runs_job import write_page

    write_page(run, to, as_json=as_json)
