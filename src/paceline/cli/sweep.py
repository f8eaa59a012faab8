"""`paceline sweep`: train one recipe under several settings, one job after the other."""

from __future__ import annotations

import json
import sys
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import common_options
from paceline.cli.console import error_output, output, print_json, print_plain

if TYPE_CHECKING:
    from paceline.studies.sweep_summary import SweepSummary

Over = Annotated[
    list[str],
    typer.Option(
        "--over",
        help="One axis: batch=32,64, replicas=1,2, accumulation=1,2, seed=1,2 or optimizer.lr=1e-3,1e-2."
        " Repeatable.",
    ),
]


def sweep(
    recipe: common_options.RecipeArgument,
    over: Over,
    strategy: common_options.StrategyOption = None,
    settings: common_options.Settings = None,
    target: common_options.TargetOption = None,
    out: common_options.Out = None,
    as_json: common_options.AsJson = False,
) -> None:
    """Train RECIPE for every combination of some settings; write a table, a plot and results.json."""
    from paceline.cli.study_runs import plan_runs, train_all
    from paceline.studies.sweep_cells import build_cells, parse_axis
    from paceline.studies.sweep_summary import MetricTarget, render_table, summarize_sweep

    metric_target = MetricTarget.parse(target) if target is not None else None
    cells = build_cells([parse_axis(text) for text in over])
    folder = out or Path("sweeps") / f"{datetime.now():%Y%m%d-%H%M%S}-{recipe.stem}"
    console = error_output() if as_json else output()
    runs = plan_runs(recipe, settings or [], strategy, cells, folder)
    done, failed, code = train_all(runs, lambda line: print_plain(line, console))
    summary = summarize_sweep(done, failed, metric_target)
    _save_results(summary, folder)
    if as_json:
        print_json(summary.to_json())
    files = [f"results: {folder / 'results.json'}", f"plot:    {folder / 'plot.svg'}"]
    for line in (*render_table(summary), *files):
        print_plain(line, console)
    sys.exit(code)


def _save_results(summary: SweepSummary, folder: Path) -> None:
    from paceline.studies.sweep_plot import render_plot
    from paceline.studies.sweep_summary import render_table

    files = {
        "results.json": json.dumps(summary.to_json(), indent=1) + "\n",
        "table.txt": "\n".join(render_table(summary)) + "\n",
        "plot.svg": render_plot(summary),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
