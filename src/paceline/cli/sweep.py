"""`paceline sweep`: what it takes. What it does is loaded when it runs, so that its help costs little."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import options

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
    from paceline.cli.sweep_job import run_sweep

    run_sweep(recipe, over, strategy, settings or [], target, out, as_json=as_json)
