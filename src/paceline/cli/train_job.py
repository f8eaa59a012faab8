"""`paceline train`: start the processes, or be one of them."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from paceline.cli import options
from paceline.cli.console import lasting_output, output
from paceline.cli.failure import record_failure
from paceline.cli.resume import changes_of, find_run, recipe_of, refuse_strangers
from paceline.cli.start import launch_again, worker_cluster
from paceline.cluster import Cluster
from paceline.errors import RecipeError
from paceline.launch import STOPPED_EXIT_CODE, Outcome, guard
from paceline.phase import LEAVING
from paceline.report import checked_run, read_run
from paceline.report.folder import RUNS, claim_run_dir, refuse_taken

if TYPE_CHECKING:
    from paceline.recipe import Recipe


class Asked(NamedTuple):
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


def run_train(asked: Asked) -> None:
    """Train a recipe, and say what came out."""
    run = None if asked.resume is None else find_run(asked.resume)
    path = asked.recipe if asked.recipe is not None or run is None else recipe_of(run)
    if path is None:
        raise RecipeError(
            "train needs a recipe, or --resume and a run folder",
            next_step="paceline train recipes/digits.toml",
        )
    resolved = options.read_recipe(path, asked.settings, asked.strategy)
    called = asked.name or path.stem
    cluster = worker_cluster()
    if cluster is not None:
        _work(cluster, resolved, path, run, called)
    if run is not None:
        refuse_strangers(run, asked.trust)
    _check_name(asked.name, resolved, run)
    processes = _as_before(run, asked.processes, asked.strategy, asked.nodes)
    token = options.read_token(asked.token_file, asked.insecure, asked.nodes)
    placement = options.Placement(
        options.processes_for(resolved, processes, asked.nodes),
        *(asked.nodes, asked.node_rank, asked.rendezvous, token),
        tls=resolved.security.tls,
    )
    sys.exit(_launch(placement, resolved, run, called, asked.logs))


def _as_before(run: Path | None, asked: int | None, strategy: str | None, nodes: int) -> int | None:
    """A run goes on with as many processes as it had, unless something else is asked for, which is told."""
    ranks = 0 if run is None else read_run(checked_run(run)).ranks
    if asked is None:
        return ranks // nodes if ranks and not strategy and not ranks % nodes else None
    if ranks and asked * nodes != ranks:
        _say(f"from here on {asked * nodes} processes, {ranks} before")
    return asked


def _say(text: str) -> None:
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


def _folder(recipe: Recipe, placement: options.Placement, called: str) -> Path:
    """The folder of a new run, which is no other run's; the first node makes it."""
    if recipe.run_dir is not None:
        if placement.node_rank == 0:
            refuse_taken(Path(recipe.run_dir))
        return Path(recipe.run_dir)
    return claim_run_dir(called) if placement.node_rank == 0 else RUNS / called


def _launch(
    placement: options.Placement, recipe: Recipe, run: Path | None, called: str, logs: Path | None = None
) -> int:
    """Start the workers and tell them which run it is; what failed is written into its folder."""
    from paceline.recipe.spell import spell

    for line in [] if run is None else changes_of(run, recipe):
        _say(line)
    if run is None:
        run_dir = _folder(recipe, placement, called)
        again = ["--set", f"run_dir={spell(str(run_dir))}"]
    else:
        run_dir = checked_run(run)
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
    placement: options.Placement, recipe: Recipe, again: Sequence[str], logs: Path | None
) -> Outcome:
    return launch_again(
        placement,
        recipe.runtime.threads,
        *again,
        stuck_seconds=recipe.runtime.deadline_seconds,
        grace_seconds=recipe.checkpoint.grace_seconds,
        log_dir=logs,
        prefixed=True,
        servers=recipe.strategy.servers,
    )


def _work(cluster: Cluster, recipe: Recipe, path: Path, resume: Path | None, called: str) -> None:
    with guard(cluster):
        from paceline.training import train as train_here

        base, console = options.task_directory(path), lasting_output()
        result = train_here(recipe, base_dir=base, resume=resume, console=console, name=called)
        cluster.enter_phase(LEAVING, recipe.runtime.setup_deadline_seconds)
    sys.exit(STOPPED_EXIT_CODE if result.stopped else 0)
