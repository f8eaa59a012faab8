"""`paceline sweep`: the same recipe under several settings, one job after the other, and what they show."""

from __future__ import annotations

import json
import sys
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from paceline.cli import options
from paceline.cli.console import output
from paceline.cli.sweep_runs import plan_runs, train_all
from paceline.studies import (
    Summary,
    Target,
    cells_of,
    parse_axis,
    render_plot,
    render_table,
    summarize,
)

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
    recipe: options.RecipeArgument,
    over: Over,
    strategy: options.StrategyOption = None,
    settings: options.Settings = None,
    target: TargetOption = None,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Train RECIPE for every combination of the axes; a table, a plot and results.json say what came out."""
    wanted = Target.parse(target) if target is not None else None
    cells = cells_of([parse_axis(text) for text in over])
    folder = out or Path("sweeps") / f"{datetime.now():%Y%m%d-%H%M%S}-{recipe.stem}"
    console = Console(stderr=True) if as_json else output()
    runs = plan_runs(recipe, settings or [], strategy, cells, folder)
    done, failed, code = train_all(runs, lambda line: _say(console, line))
    summary = summarize(done, failed, wanted)
    _keep(summary, folder)
    if as_json:
        output().print_json(json.dumps(summary.to_json()))
    ends = [f"results: {folder / 'results.json'}", f"plot:    {folder / 'plot.svg'}"]
    _say(console, *render_table(summary), *ends)
    sys.exit(code)


def _keep(summary: Summary, folder: Path) -> None:
    """The same, as files."""
    files = {
        "results.json": json.dumps(summary.to_json(), indent=1) + "\n",
        "table.txt": "\n".join(render_table(summary)) + "\n",
        "plot.svg": render_plot(summary),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")


def _say(console: Console, *lines: str) -> None:
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
