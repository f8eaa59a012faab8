"""The runs of a sweep or a comparison: what each is in full, and training them one by one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli import common_options
from paceline.errors import RecipeError
from paceline.job.cluster import process_environment
from paceline.launch.fork_client import fork_server
from paceline.launch.job_spec import LaunchJob
from paceline.launch.launcher import launch
from paceline.report.run_files import METRICS, RECIPE
from paceline.studies.sweep_cells import SweepCell
from paceline.studies.sweep_summary import RunMeasurements, read_measurements

if TYPE_CHECKING:
    from paceline.recipe.recipe import Recipe

_COMPLETE = "complete"
_RESOLVED_RECIPE = "asked.toml"
"""What a cell is, as the sweep resolved it; the run's own recipe also has what its machine has chosen."""
_STOPPED_EXIT_CODES = (129, 130, 143)
_EVALUATE_EVERY = 20
"""Steps of the recipe's own batch between evaluations, for recipes that say nothing."""

CompletedRuns = list[tuple[SweepCell, RunMeasurements]]


@dataclass(frozen=True)
class StudyRun:
    """One cell.

    Args:
        folder: of its run.
        recipe: in full; None if there is none such.
        refusal: why there is none.
        lab: options of `paceline lab run`, if it runs there.
    """

    cell: SweepCell
    folder: Path
    recipe: Recipe | None
    refusal: str = ""
    lab: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        """Was it trained to its end before?"""
        return (self.folder / _COMPLETE).exists()


def plan_runs(
    path: Path, settings: Sequence[str], strategy: str | None, cells: Sequence[SweepCell], folder: Path
) -> list[StudyRun]:
    """Resolve every cell before any is trained.

    Raises:
        RecipeError: the recipe is wrong, no cell is possible, or the folder holds runs of other recipes.
    """
    usual = common_options.read_recipe(path, list(settings), strategy).batch.size
    runs: list[StudyRun] = []
    refusals: list[RecipeError] = []
    for cell in cells:
        place = folder / cell.folder
        try:
            recipe = with_evaluation_interval(_resolve(path, settings, strategy, cell), usual)
        except RecipeError as error:
            refusals.append(error)
            runs.append(StudyRun(cell, place, None, error.what))
        else:
            runs.append(StudyRun(cell, place, recipe.replace(run_dir=str(place.resolve()))))
    if len(refusals) == len(cells):
        raise refusals[0]
    refuse_other_recipes(runs)
    return runs


def _resolve(path: Path, settings: Sequence[str], strategy: str | None, cell: SweepCell) -> Recipe:
    recipe = common_options.read_recipe(path, [*settings, *cell.overrides], strategy)
    if cell.accumulation is not None:
        recipe = recipe.replace(batch=recipe.batch.replace(shards=None, accumulation=cell.accumulation))
    common_options.processes_for(recipe, None, 1)
    return recipe


def with_evaluation_interval(recipe: Recipe, usual: int) -> Recipe:
    """Evaluate after the same numbers of samples in every cell, so that steps to a target can be told."""
    if recipe.evaluate.every_steps:
        return recipe
    every = max(1, _EVALUATE_EVERY * usual // recipe.batch.size)
    return recipe.replace(evaluate=recipe.evaluate.replace(every_steps=every))


def refuse_other_recipes(runs: Sequence[StudyRun]) -> None:
    """Raises: RecipeError: a folder holds a run of another recipe."""
    for run in runs:
        there = run.folder / _RESOLVED_RECIPE
        asked = None if run.recipe is None else _recipe_text(run.recipe.replace(run_dir=None))
        if asked is not None and there.exists() and there.read_text("utf-8") != asked:
            raise RecipeError(
                "the folder holds a run of another recipe",
                where=str(there),
                next_step="choose another --out, or give the recipe and the settings of the first time",
            )


def _recipe_text(recipe: Recipe) -> str:
    from paceline.recipe.recipe import to_toml

    return to_toml(recipe)


def train_all(
    runs: Sequence[StudyRun], say: Callable[[str], None], over: Callable[[StudyRun], None] = lambda run: None
) -> tuple[CompletedRuns, dict[str, str], int]:
    """Train what is not complete; one that fails is told, and the rest goes on.

    Args:
        over: is called when a run has ended, however.
    Returns:
        What is complete, why others are not, and the exit code: 0, 1, or that of a request to stop.
    """
    with ExitStack() as stack:
        several = sum(not run.complete and run.recipe is not None for run in runs) > 1
        variables = (
            stack.enter_context(
                fork_server(
                    [
                        "paceline.cli.main",
                        "paceline.cli.train",
                        "paceline.cli.relaunch",
                        "paceline.cli.resume",
                    ]
                )
            )
            if several
            else {}
        )
        return _train_all(runs, say, {**process_environment(), **variables}, over)


def _train_all(
    runs: Sequence[StudyRun],
    say: Callable[[str], None],
    environ: Mapping[str, str],
    over: Callable[[StudyRun], None],
) -> tuple[CompletedRuns, dict[str, str], int]:
    done: CompletedRuns = []
    failed: dict[str, str] = {}
    for i, run in enumerate(runs, 1):
        say(f"[{i}/{len(runs)}] {run.cell.label}{': complete before' if run.complete else ''}")
        why, code = ("", 0) if run.complete else _train(run, environ)
        if code in _STOPPED_EXIT_CODES:
            say("stopped: the same command with --out goes on from here")
            return done, failed, code
        if why:
            failed[run.cell.label] = why
            say(f"  failed: {why}")
        else:
            done.append((run.cell, read_measurements(run.folder)))
            say(f"  {_result_text(done[-1][1])}")
        over(run)
    return done, failed, int(bool(failed))


def _train(run: StudyRun, environ: Mapping[str, str]) -> tuple[str, int]:
    """One ordinary job, whose output goes to its folder; returns why it failed, and its exit code."""
    if run.recipe is None:
        return run.refusal, RecipeError.exit_code
    run.folder.mkdir(parents=True, exist_ok=True)
    again = any((run.folder / "checkpoints").glob("step-*/manifest.json"))
    if not again:  # what a try without a checkpoint has measured is measured again
        for name in (METRICS, RECIPE):
            (run.folder / name).unlink(missing_ok=True)
    words = ["train", str(write_resolved_recipe(run, run.recipe)), *_run_folder_options(run, again)]
    code, said = _run_in_lab(run, words) if run.lab else _run_here(run, words, environ)
    if code:
        return said.partition("\n")[0] or f"exit code {code}", code
    (run.folder / _COMPLETE).touch()
    return "", 0


def write_resolved_recipe(run: StudyRun, recipe: Recipe) -> Path:
    """Write down what is trained, and where that stands."""
    path = run.folder / _RESOLVED_RECIPE
    path.write_text(_recipe_text(recipe.replace(run_dir=None)), encoding="utf-8")
    return path


def _run_here(run: StudyRun, words: Sequence[str], environ: Mapping[str, str]) -> tuple[int, str]:
    """One job on this machine; its exit code, and what was said of a failure."""
    assert run.recipe is not None, "asked for before"
    said: list[str] = []
    job = LaunchJob(
        (sys.executable, "-m", "paceline", *words),
        common_options.processes_for(run.recipe, None, 1),
        threads=run.recipe.runtime.threads,
        log_dir=run.folder / "logs",
        output="logged",
        grace_seconds=run.recipe.checkpoint.grace_seconds,
    )
    return launch(job, environ=environ, say=said.append).exit_code, "".join(said)


def _run_in_lab(run: StudyRun, words: Sequence[str]) -> tuple[int, str]:
    """The same over the hosts of a lab; what a request to stop ends is 130, as of a job."""
    log = run.folder / "logs" / "lab.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8") as stream:
        try:
            done = subprocess.run(run_command(run, words), stdout=stream, stderr=stream, check=False)
        except KeyboardInterrupt:
            return _STOPPED_EXIT_CODES[1], ""
    text = log.read_text("utf-8", errors="replace")
    why = [line for line in text.splitlines() if " error: " in f" {line}" or "raised" in line]
    return done.returncode, (why or [""])[0]


def run_command(run: StudyRun, words: Sequence[str]) -> list[str]:
    """`paceline WORDS` with the processes of a run as a command of its own, in its lab if it has one."""
    assert run.recipe is not None, "it can run"
    whole = [*words, "-n", str(common_options.processes_for(run.recipe, None, 1))]
    base = [sys.executable, "-m", "paceline"]
    return [*base, "lab", "run", *run.lab, "--", "paceline", *whole] if run.lab else [*base, *whole]


def _run_folder_options(run: StudyRun, again: bool) -> tuple[str, str]:
    """Where the run goes, or goes on."""
    from paceline.recipe.toml_text import toml_value

    return (
        ("--resume", str(run.folder))
        if again
        else ("--set", f"run_dir={toml_value(str(run.folder.resolve()))}")
    )


def _result_text(run: RunMeasurements) -> str:
    last = run.points[-1].values if run.points else {}
    values = "  ".join(f"{name} {value:.4g}" for name, value in last.items())
    return (
        f"{run.steps} steps in {run.seconds:.1f} s, {run.samples_per_second:.0f} samples/s  {values}".rstrip()
    )
