"""A sweep as a job array of Slurm: one task for each combination, which saves and is queued again alone.

The folder is that of a `paceline sweep`, whose `--collect` reads the results. The resolved recipe of each run
is written before the array starts, so that a change of the recipe meanwhile has no effect.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli import common_options
from paceline.cli.console import error_output, print_plain
from paceline.cli.job_request import SubmitArgs, planned_bytes, show_request
from paceline.errors import RecipeError, format_count

if TYPE_CHECKING:
    from paceline.launch.job_target import JobTarget
    from paceline.recipe.recipe import Recipe


def render_sweep(args: SubmitArgs, show: Callable[[str], object]) -> dict[str, str]:
    """Return the files of a job array by their path in the folder of the sweep; the first is its script.

    Runs that are complete are left out, and so are combinations that are not possible, with a warning.

    Args:
        show: prints what a task requests.
    Raises:
        RecipeError, StrategyError: the recipe, an axis or an option is wrong, or no run is left.
    """
    from paceline.cli.study_runs import RESOLVED_RECIPE, plan_runs, resolved_text
    from paceline.launch.rendered_job import plan_array_resources, refuse_secret_settings, render_array
    from paceline.studies.sweep_cells import build_cells, parse_axis

    if args.engine != "slurm":
        raise RecipeError(
            f"--over is a job array, and {args.engine} has none",
            next_step=f"--on slurm; or one `paceline submit --on {args.engine} --set KEY=VALUE` for each run",
        )
    refuse_secret_settings([*args.settings, *args.over])
    cells = build_cells([parse_axis(text) for text in args.over])
    runs = plan_runs(args.recipe, args.settings, args.strategy, cells, args.folder)
    jobs: list[tuple[Recipe, JobTarget]] = []
    for run in runs:
        if run.recipe is None:
            print_plain(f"warning: {run.cell.label} is left out: {run.refusal}", error_output())
        elif not run.complete and run.status != "finished":
            jobs.append((run.recipe, _target_of(args, run.recipe, run.folder.resolve(), show)))
    if not jobs:
        raise RecipeError("all runs of this sweep are complete", next_step=collect_command(args))
    show(f"{format_count(len(jobs), 'task')}; the largest:")
    show_request(args, plan_array_resources(jobs), jobs[0][1], show)
    return render_array(jobs) | {
        f"{Path(target.run_dir).name}/{RESOLVED_RECIPE}": resolved_text(recipe) for recipe, target in jobs
    }


def _target_of(args: SubmitArgs, recipe: Recipe, folder: Path, show: Callable[[str], object]) -> JobTarget:
    from paceline.cli.study_runs import RESOLVED_RECIPE
    from paceline.launch.job_target import JobTarget

    count = common_options.processes_for(recipe, args.processes, args.nodes)
    return JobTarget(
        engine=args.engine,
        name=args.name,
        nodes=args.nodes,
        processes=count,
        command=(sys.executable, "-m", "paceline"),
        recipe_path=str(folder / RESOLVED_RECIPE),
        run_dir=str(folder),
        options=args.options,
        planned_bytes=planned_bytes(args, recipe, count, show),
    )


def collect_command(args: SubmitArgs) -> str:
    """Return the command that prints the results of a job array."""
    words = ["paceline", "sweep", str(args.recipe), "--collect", "--out", str(args.folder)]
    words += ["--strategy", args.strategy] if args.strategy is not None else []
    words += [word for text in args.settings for word in ("--set", text)]
    return shlex.join([*words, *(word for text in args.over for word in ("--over", text))])
