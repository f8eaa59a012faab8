"""`paceline train`: what it takes. What it does is loaded when it runs, so that its help costs little."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import options


def train(
    recipe: Annotated[
        Path | None, typer.Argument(help="The recipe, a TOML file.", show_default=False)
    ] = None,
    processes: options.Processes = None,
    strategy: options.StrategyOption = None,
    settings: options.Settings = None,
    resume: Annotated[
        str | None,
        typer.Option(
            "--resume",
            metavar="[RUN]",
            help="Go on with a run folder or a checkpoint inside one; without RUN: the newest in runs/.",
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option("--name", help="Names the new folder runs/TIME-NAME. Default: the recipe's name."),
    ] = None,
    nodes: options.Nodes = 1,
    node_rank: options.NodeRank = 0,
    rendezvous: options.Rendezvous = None,
    token_file: options.TokenFile = "",
    insecure: options.Insecure = False,
    trust: options.Trust = False,
    logs: Annotated[
        Path | None, typer.Option("--logs", help="Keep the output of each rank but the first here.")
    ] = None,
) -> None:
    """Train a recipe, and say what came out."""
    from paceline.cli.train_job import Asked, run_train

    nodes_of = (nodes, node_rank, rendezvous, token_file, insecure)
    run_train(Asked(recipe, processes, strategy, settings, resume, name, *nodes_of, trust, logs))
