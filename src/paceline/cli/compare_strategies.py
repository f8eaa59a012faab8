"""`paceline compare`: what it takes. What it does is loaded when it runs, so that its help costs little."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import common_options
from paceline.cli.sweep import AsJson, Out, TargetOption

Strategies = Annotated[
    Path, typer.Option("--strategies", help='TOML: name = "strategy", or { strategy = ..., set = [...] }.')
]
Seeds = Annotated[int, typer.Option("--seeds", min=1, help="Runs of each strategy, with seed 1, 2, ...")]
Kills = Annotated[
    int, typer.Option("--kills", min=0, help="Of these seeds, in how many a further run loses a worker.")
]
InLab = Annotated[
    str, typer.Option("--lab", help='Run every job in a lab: "hosts=4 rate=100mbit latency=2ms".')
]


def compare_strategies(
    recipe: common_options.RecipeArgument,
    strategies: Strategies,
    lab: InLab = "",
    seeds: Seeds = 3,
    kills: Kills = 1,
    settings: common_options.Settings = None,
    target: TargetOption = None,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Train RECIPE under every strategy of FILE, over seeds; tables and a page hold what was measured."""
    from paceline.cli.comparison_runs import CompareArgs, run_compare

    run_compare(
        CompareArgs(recipe, strategies, lab, seeds, kills, settings or [], target, out), as_json=as_json
    )
