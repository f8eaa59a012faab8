"""Start the processes of a call, show what they say, and take what rank 0 gives back."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.calls.order import Given, Order
from paceline.calls.show import shown_on
from paceline.cluster import Cluster
from paceline.errors import RecipeError, WorkerError
from paceline.launch import Job, launch, script_command

if TYPE_CHECKING:
    from rich.console import Console

    from paceline.recipe import Recipe


def runs_here(processes: int | None) -> bool:
    """Whether this process is a rank itself.

    Raises:
        RecipeError: it is one, and another number of processes is asked for.
    """
    cluster = Cluster.from_env()
    if processes is None or not cluster.launched:
        return processes is None
    if processes != cluster.world_size:
        raise RecipeError(
            f"processes={processes}, and this script is one of {cluster.world_size} processes already",
            next_step="leave processes out; `paceline run` or torchrun says how many",
        )
    return True


def call_on_processes(
    function: Callable[..., Any],
    recipe: Any,
    task: Any,
    options: Mapping[str, Any],
    *,
    processes: int,
    console: Console | None = None,
    reports: bool = False,
) -> Given:
    """Call `function(recipe, task, **options)` on every rank of a job of its own.

    Ctrl-C, or the notebook's interrupt, asks the job to stop: it saves, and the call returns what came out.

    Args:
        console: where lines are shown; None: standard output, or the notebook.
        reports: see `Order`.
    Raises:
        WorkerError: a rank failed; its report has been shown.
    """
    from paceline.training.given import given_recipe

    resolved, base_dir = given_recipe(recipe, task, options["base_dir"])  # what is wrong is said at once
    order = Order(function, resolved, task, {**options, "base_dir": base_dir}, reports)
    with tempfile.TemporaryDirectory(prefix="paceline-call-") as folder, shown_on(console) as say:
        order.save(Path(folder))
        outcome = launch(_job(Path(folder), processes, resolved, saves=reports), say=say)
        given = Given.load(Path(folder))
    if outcome.failures or given is None:
        raise WorkerError(
            (outcome.report.splitlines() or [f"the processes ended with exit code {outcome.exit_code}"])[0],
            where=f"one of {processes} processes that this call has started",
            next_step="what it said stands above",
        )
    return given


def _job(folder: Path, processes: int, recipe: Recipe, *, saves: bool) -> Job:
    return Job(
        command=script_command("-m", "paceline.calls", str(folder)),
        num_processes=processes,
        threads=recipe.runtime.threads,
        output="shown",
        stuck_seconds=recipe.runtime.deadline_seconds,
        grace_seconds=recipe.checkpoint.grace_seconds if saves else Job.grace_seconds,
        announces=saves,
    )
