"""`paceline compare`: the command line of a comparison; `comparison_runs` holds what it runs.

That module imports rich and the studies at the top, so it stays apart from this one, which the help loads.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import common_options

Strategies = Annotated[
    Path,
    typer.Option(
        "--strategies", help='TOML file of lines name = "strategy" or { strategy = ..., set = [...] }.'
    ),
]
Seeds = Annotated[int, typer.Option("--seeds", min=1, help="Runs of each strategy, with seeds 1, 2, ...")]
Kills = Annotated[
    int,
    typer.Option(
        "--kills", min=0, help="Number of these seeds with one more run, in which a worker is killed."
    ),
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
    target: common_options.TargetOption = None,
    out: common_options.Out = None,
    as_json: common_options.AsJson = False,
) -> None:
    """Train RECIPE with every strategy of a file over several seeds; write tables and a page."""
    from paceline.cli.comparison_runs import CompareArgs, run_compare
    from paceline.job.cluster import current_place, refuse_engine_tasks

    refuse_engine_tasks(current_place(), "paceline compare")
    run_compare(
        CompareArgs(
            recipe=recipe,
            strategies=strategies,
            lab=lab,
            seeds=seeds,
            kills=kills,
            settings=settings or [],
            target=target,
            out=out,
            as_json=as_json,
        )
    )
