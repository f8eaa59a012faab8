"""`paceline train`: start the processes, or be one of them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import options
from paceline.cli.console import lasting_output, output
from paceline.cli.failure import record_failure
from paceline.cli.resume import changes_of, find_run, recipe_of, refuse_strangers
from paceline.cli.start import launch_again, worker_cluster
from paceline.cluster import Cluster
from paceline.errors import RecipeError
from paceline.launch import STOPPED_EXIT_CODE, guard
from paceline.report import checked_run, new_run_dir

if TYPE_CHECKING:
    from paceline.recipe import Recipe


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
    nodes: options.Nodes = 1,
    node_rank: options.NodeRank = 0,
    rendezvous: options.Rendezvous = None,
    token_file: options.TokenFile = "",
    insecure: options.Insecure = False,
    trust: options.Trust = False,
) -> None:
    """Train a recipe, and say what came out."""
    run = None if resume is None else find_run(resume)
    path = recipe if recipe is not None or run is None else recipe_of(run)
    if path is None:
        raise RecipeError(
            "train needs a recipe, or --resume and a run folder",
            next_step="paceline train recipes/digits.toml",
        )
    resolved = options.read_recipe(path, settings, strategy)
    cluster = worker_cluster()
    if cluster is not None:
        _work(cluster, resolved, path, run)
    if run is not None:
        refuse_strangers(run, trust)
    token = options.read_token(token_file, insecure, nodes)
    placement = options.Placement(
        options.processes_for(resolved, processes, nodes), nodes, node_rank, rendezvous, token
    )
    sys.exit(_launch(placement, resolved, run))


def _launch(placement: options.Placement, recipe: Recipe, run: Path | None) -> int:
    """Start the workers and tell them which run it is; what failed is written into its folder."""
    from paceline.recipe.spell import spell

    for line in [] if run is None else changes_of(run, recipe):
        output().print(line, markup=False, highlight=False, soft_wrap=True)
    if run is None:
        run_dir = Path(recipe.run_dir) if recipe.run_dir is not None else new_run_dir(recipe.task)
        again = ["--set", f"run_dir={spell(str(run_dir))}"]
    else:
        run_dir = checked_run(run)
        again = ["--resume", str(run)]
    runtime, grace = recipe.runtime, recipe.checkpoint.grace_seconds
    outcome = launch_again(
        placement, runtime.threads, *again, stuck_seconds=runtime.deadline_seconds, grace_seconds=grace
    )
    if outcome.failures and placement.node_rank == 0:
        record_failure(run_dir, outcome)
    return outcome.exit_code


def _work(cluster: Cluster, recipe: Recipe, path: Path, resume: Path | None) -> None:
    with guard(cluster):
        from paceline.training import train as train_here

        result = train_here(
            recipe, base_dir=options.task_directory(path), resume=resume, console=lasting_output()
        )
    sys.exit(STOPPED_EXIT_CODE if result.stopped else 0)
