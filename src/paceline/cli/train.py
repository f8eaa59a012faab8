"""`paceline train`: start the processes, or be one of them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import options
from paceline.cli.console import output
from paceline.cli.failure import record_failure
from paceline.cli.start import launch_again, worker_cluster
from paceline.cluster import Cluster
from paceline.errors import RecipeError
from paceline.launch import guard
from paceline.recipe import Recipe
from paceline.recipe.spell import spell
from paceline.report import checked_run, new_run_dir

STOPPED_EXIT_CODE = 143


def train(
    recipe: Annotated[
        Path | None, typer.Argument(help="The recipe, a TOML file.", show_default=False)
    ] = None,
    processes: options.Processes = None,
    strategy: options.StrategyOption = None,
    settings: options.Settings = None,
    resume: Annotated[
        Path | None, typer.Option("--resume", help="A run folder, or a checkpoint inside one, to go on with.")
    ] = None,
    nodes: options.Nodes = 1,
    node_rank: options.NodeRank = 0,
    rendezvous: options.Rendezvous = None,
    token: options.Token = "",
) -> None:
    """Train a recipe, and say what came out."""
    if (recipe is None) == (resume is None):
        raise RecipeError(
            "train needs a recipe, or --resume and a run folder",
            next_step="paceline train recipes/digits.toml",
        )
    path = options.checked_resume(resume) if resume is not None else recipe
    assert path is not None
    resolved = options.read_recipe(path, settings, strategy)
    cluster = worker_cluster()
    if cluster is not None:
        _work(cluster, resolved, path, resume)
    count = options.processes_for(resolved, processes, nodes)
    placement = options.Placement(count, nodes, node_rank, rendezvous, token)
    named = resolved.run_dir or new_run_dir(resolved.task)
    run_dir = Path(named) if resume is None else checked_run(resume)
    again = ["--set", f"run_dir={spell(str(run_dir))}"] if resume is None else []
    outcome = launch_again(placement, resolved.runtime.threads, *again)
    if outcome.failures and node_rank == 0:
        record_failure(run_dir, outcome)
    sys.exit(outcome.exit_code)


def _work(cluster: Cluster, recipe: Recipe, path: Path, resume: Path | None) -> None:
    with guard(cluster):
        from paceline.training import train as train_here

        result = train_here(recipe, base_dir=options.task_directory(path), resume=resume, console=output())
    sys.exit(STOPPED_EXIT_CODE if result.stopped else 0)
