"""`paceline train`: what it takes. What it does is loaded when it runs, so that its help costs little.

What the launcher knows of a failure goes into the folder of the run: the workers may be gone.

`paceline train`: start the processes, or be one of them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from paceline.cli import common_options
from paceline.cli.console import job_output, output
from paceline.cli.relaunch import relaunch, worker_cluster
from paceline.cli.resume import find_recipe, find_run, recipe_changes, require_own_run
from paceline.errors import RecipeError, RunFolderError
from paceline.job.cluster import Cluster
from paceline.job.launcher_reports import LEAVING
from paceline.launch.outcome import STOPPED_EXIT_CODE, LaunchOutcome
from paceline.launch.worker_guard import guard
from paceline.observe.sinks import JsonLinesSink, TextLogSink
from paceline.report.html_page import write_report
from paceline.report.run_files import (
    LOG,
    METRICS,
    RUNS,
    claim_run_dir,
    is_run_folder,
    refuse_existing_run,
    resolve_run_folder,
)
from paceline.report.run_reader import read_run

if TYPE_CHECKING:
    from paceline.recipe.recipe import Recipe


def train(
    recipe: Annotated[
        Path | None, typer.Argument(help="The recipe, a TOML file.", show_default=False)
    ] = None,
    processes: common_options.Processes = None,
    strategy: common_options.StrategyOption = None,
    settings: common_options.Settings = None,
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
    nodes: common_options.Nodes = 1,
    node_rank: common_options.NodeRank = 0,
    rendezvous: common_options.Rendezvous = None,
    token_file: common_options.TokenFile = "",
    insecure: common_options.Insecure = False,
    trust: common_options.Trust = False,
    logs: Annotated[
        Path | None, typer.Option("--logs", help="Keep the output of each rank but the first here.")
    ] = None,
) -> None:
    """Train a recipe, and say what came out."""

    nodes_of = (nodes, node_rank, rendezvous, token_file, insecure)
    run_train(TrainArgs(recipe, processes, strategy, settings, resume, name, *nodes_of, trust, logs))


def record_failure(run_dir: Path, outcome: LaunchOutcome) -> None:
    """Write every failure, the cause first, to the metrics and the log, and the page of the run anew.

    Nothing is written where the run had no folder yet. A folder that cannot be written takes nothing from
    the report on the terminal, which has been shown.
    """
    if not is_run_folder(run_dir):
        return
    try:
        _write_failure(run_dir, outcome)
    except (OSError, RunFolderError) as error:
        output().print(f"the failure cannot be recorded in {run_dir}: {error}", markup=False, highlight=False)


def _write_failure(run_dir: Path, outcome: LaunchOutcome) -> None:
    def say(text: str) -> None:
        output().print(f"the failure cannot be recorded in {run_dir}: {text}", markup=False, highlight=False)

    metrics, log = JsonLinesSink(run_dir / METRICS, say=say), TextLogSink(run_dir / LOG, say=say)
    for failure in outcome.failures:
        text = f"rank {failure.global_rank} {failure.headline}"
        record = {"text": text, "kind": failure.kind, "exit_code": failure.exit_code}
        metrics.event("error", {"rank": failure.global_rank, **record})
    log.write("error", outcome.report)
    metrics.close()
    log.close()
    write_report(run_dir)


class TrainArgs(NamedTuple):
    """The words of the command; see `paceline train --help`."""

    recipe: Path | None
    processes: int | None
    strategy: str | None
    settings: list[str] | None
    resume: str | None
    name: str | None
    nodes: int
    node_rank: int
    rendezvous: str | None
    token_file: str
    insecure: bool
    trust: bool
    logs: Path | None


def run_train(asked: TrainArgs) -> None:
    """Train a recipe, and say what came out."""
    run = None if asked.resume is None else find_run(asked.resume)
    path = asked.recipe if asked.recipe is not None or run is None else find_recipe(run)
    if path is None:
        raise RecipeError(
            "train needs a recipe, or --resume and a run folder",
            next_step="paceline train recipes/digits.toml",
        )
    resolved = common_options.read_recipe(path, asked.settings, asked.strategy)
    called = asked.name or path.stem
    cluster = worker_cluster()
    if cluster is not None:
        _train_rank(cluster, resolved, path, run, called)
    if run is not None:
        require_own_run(run, asked.trust)
    _check_name(asked.name, resolved, run)
    processes = _num_processes(run, asked.processes, asked.strategy, asked.nodes)
    token = common_options.read_token(asked.token_file, asked.insecure, asked.nodes)
    placement = common_options.JobPlacement(
        common_options.processes_for(resolved, processes, asked.nodes),
        *(asked.nodes, asked.node_rank, asked.rendezvous, token),
        tls=resolved.security.tls,
    )
    sys.exit(_launch(placement, resolved, run, called, asked.logs))


def _num_processes(run: Path | None, asked: int | None, strategy: str | None, nodes: int) -> int | None:
    """A run goes on with as many processes as it had, unless something else is asked for, which is told."""
    ranks = 0 if run is None else read_run(resolve_run_folder(run)).ranks
    if asked is None:
        return ranks // nodes if ranks and not strategy and not ranks % nodes else None
    if ranks and asked * nodes != ranks:
        _print_line(f"from here on {asked * nodes} processes, {ranks} before")
    return asked


def _print_line(text: str) -> None:
    output().print(text, markup=False, highlight=False, soft_wrap=True)


def _check_name(name: str | None, recipe: Recipe, run: Path | None) -> None:
    """Raises: RecipeError: it is no name of a folder, or the run has a folder already."""
    if name is None:
        return
    taken = f"run_dir = {recipe.run_dir}" if recipe.run_dir is not None else f"--resume {run}" if run else ""
    if taken:
        raise RecipeError(
            f"--name {name} names a new folder, and {taken} names one", next_step="leave one out"
        )
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise RecipeError(
            f"--name '{name}' is no name of a folder", next_step="letters, digits, dots, _ and - make a name"
        )


def _folder(recipe: Recipe, placement: common_options.JobPlacement, called: str) -> Path:
    """The folder of a new run, which is no other run's; the first node makes it."""
    if recipe.run_dir is not None:
        if placement.node_rank == 0:
            refuse_existing_run(Path(recipe.run_dir))
        return Path(recipe.run_dir)
    return claim_run_dir(called) if placement.node_rank == 0 else RUNS / called


def _launch(
    placement: common_options.JobPlacement,
    recipe: Recipe,
    run: Path | None,
    called: str,
    logs: Path | None = None,
) -> int:
    """Start the workers and tell them which run it is; what failed is written into its folder."""
    from paceline.recipe.toml_text import toml_value

    for line in [] if run is None else recipe_changes(run, recipe):
        _print_line(line)
    if run is None:
        run_dir = _folder(recipe, placement, called)
        again = ["--set", f"run_dir={toml_value(str(run_dir))}"]
    else:
        run_dir = resolve_run_folder(run)
        again = ["--resume", str(run)]
    try:
        outcome = _launch_again(placement, recipe, again, logs)
        if outcome.failures and placement.node_rank == 0:
            record_failure(run_dir, outcome)
    finally:
        if run is None and recipe.run_dir is None:
            with suppress(OSError):  # it is empty: the run never began
                run_dir.rmdir()
    return outcome.exit_code


def _launch_again(
    placement: common_options.JobPlacement, recipe: Recipe, again: Sequence[str], logs: Path | None
) -> LaunchOutcome:
    return relaunch(
        placement,
        recipe.runtime.threads,
        *again,
        stuck_seconds=recipe.runtime.deadline_seconds,
        grace_seconds=recipe.checkpoint.grace_seconds,
        log_dir=logs,
        prefixed=True,
        servers=recipe.strategy.servers,
    )


def _train_rank(cluster: Cluster, recipe: Recipe, path: Path, resume: Path | None, called: str) -> None:
    with guard(cluster):
        from paceline.session.train_rank import train as train_here

        base, console = common_options.task_directory(path), job_output()
        result = train_here(recipe, base_dir=base, resume=resume, console=console, name=called)
        cluster.enter_phase(LEAVING, recipe.runtime.setup_deadline_seconds)
    sys.exit(STOPPED_EXIT_CODE if result.stopped else 0)
