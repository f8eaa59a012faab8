"""`paceline sweep`: what it takes. What it does is loaded when it runs, so that its help costs little.

`paceline sweep`: the same recipe under several settings, one job after the other, and what they show.
"""

from __future__ import annotations

import json
import sys
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import common_options
from paceline.cli.console import error_output, output
from paceline.cli.study_runs import plan_runs, train_all
from paceline.studies.sweep_cells import build_cells, parse_axis
from paceline.studies.sweep_plot import render_plot
from paceline.studies.sweep_summary import MetricTarget, SweepSummary, render_table, summarize_sweep

if TYPE_CHECKING:
    from rich.console import Console

Over = Annotated[
    list[str],
    typer.Option(
        "--over",
        help="An axis: batch=32,64 or replicas=1,2 or accumulation=1,2 or seed=1,2 or optimizer.lr=1e-3.",
    ),
]
TargetOption = Annotated[
    str | None,
    typer.Option("--target", help='"accuracy>=0.95" or "loss<=0.3"; default: the loss that all runs reach.'),
]
Out = Annotated[Path | None, typer.Option("--out", help="Folder; one that is there already is completed.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the results as JSON.")]


def sweep(
    recipe: common_options.RecipeArgument,
    over: Over,
    strategy: common_options.StrategyOption = None,
    settings: common_options.Settings = None,
    target: TargetOption = None,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Train RECIPE for every combination of the axes; a table, a plot and results.json say what came out."""

    run_sweep(recipe, over, strategy, settings or [], target, out, as_json=as_json)


def run_sweep(
    recipe: Path,
    over: list[str],
    strategy: str | None,
    settings: list[str],
    target: str | None,
    out: Path | None,
    *,
    as_json: bool,
) -> None:
    """See `paceline sweep --help`."""
    wanted = MetricTarget.parse(target) if target is not None else None
    cells = build_cells([parse_axis(text) for text in over])
    folder = out or Path("sweeps") / f"{datetime.now():%Y%m%d-%H%M%S}-{recipe.stem}"
    console = error_output() if as_json else output()
    runs = plan_runs(recipe, settings, strategy, cells, folder)
    done, failed, code = train_all(runs, lambda line: _print_lines(console, line))
    summary = summarize_sweep(done, failed, wanted)
    _save_results(summary, folder)
    if as_json:
        output().print_json(json.dumps(summary.to_json()))
    ends = [f"results: {folder / 'results.json'}", f"plot:    {folder / 'plot.svg'}"]
    _print_lines(console, *render_table(summary), *ends)
    sys.exit(code)


def _save_results(summary: SweepSummary, folder: Path) -> None:
    """The same, as files."""
    files = {
        "results.json": json.dumps(summary.to_json(), indent=1) + "\n",
        "table.txt": "\n".join(render_table(summary)) + "\n",
        "plot.svg": render_plot(summary),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")


def _print_lines(console: Console, *lines: str) -> None:
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
