"""The runs of a sweep or a comparison: resolve their recipes, and train them one after the other.

Invariant: every recipe is resolved before the first run starts, and no folder is reused for another recipe.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli import common_options
from paceline.errors import RecipeError, format_count
from paceline.job.cluster import process_environment
from paceline.launch.fork_client import fork_server
from paceline.launch.job_spec import LaunchJob
from paceline.launch.launcher import launch
from paceline.launch.shutdown import ShutdownTimeouts
from paceline.observe.sinks import METRICS
from paceline.report.run_files import RECIPE, is_run_folder
from paceline.report.run_reader import read_run
from paceline.studies.sweep_cells import SweepCell
from paceline.studies.sweep_summary import RunMeasurements, read_measurements

if TYPE_CHECKING:
    from paceline.recipe.recipe import Recipe

_COMPLETE = "complete"
RESOLVED_RECIPE = "asked.toml"
"""File with the recipe as the sweep resolved it; recipe.toml of the run also has choices of its machine."""
STOPPED_EXIT_CODES = (129, 130, 143)
_EVALUATE_EVERY = 20
"""Steps between evaluations, at the recipe's own batch size, if the recipe does not set an interval."""

TRAIN_MODULES = ("paceline.cli.main", "paceline.cli.train", "paceline.cli.relaunch", "paceline.cli.resume")
"""Modules that a fork server imports for `paceline train`; the last two are imported inside its functions."""

CompletedRuns = list[tuple[SweepCell, RunMeasurements]]


@dataclass(frozen=True)
class StudyRun:
    """One run of a study.

    Args:
        folder: its run folder.
        recipe: the resolved recipe; None if this combination is not possible.
        refusal: the reason why it is not possible.
        lab: options of `paceline lab run` for a run in a lab; empty: on this machine.
    """

    cell: SweepCell
    folder: Path
    recipe: Recipe | None
    refusal: str = ""
    lab: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        """Return whether the run has been trained to its end."""
        return (self.folder / _COMPLETE).exists()

    @property
    def status(self) -> str:
        """The state of the run, as in `paceline runs`; "not started" without a run."""
        return read_run(self.folder).status if is_run_folder(self.folder) else "not started"


def plan_runs(
    path: Path, settings: Sequence[str], strategy: str | None, cells: Sequence[SweepCell], folder: Path
) -> list[StudyRun]:
    """Resolve the recipe of every cell.

    Raises:
        RecipeError: the recipe is wrong, no cell is possible, or the folder holds runs of other recipes.
    """
    base_batch = common_options.read_recipe(path, list(settings), strategy).batch.size
    runs: list[StudyRun] = []
    refusals: list[RecipeError] = []
    for cell in cells:
        run_dir = folder / cell.folder
        try:
            recipe = with_evaluation_interval(_resolve(path, settings, strategy, cell), base_batch)
        except RecipeError as error:
            refusals.append(error)
            runs.append(StudyRun(cell, run_dir, None, error.what))
        else:
            runs.append(StudyRun(cell, run_dir, recipe.replace(run_dir=str(run_dir.resolve()))))
    if len(refusals) == len(cells):
        raise refusals[0]
    refuse_other_recipes(runs)
    return runs


def _resolve(path: Path, settings: Sequence[str], strategy: str | None, cell: SweepCell) -> Recipe:
    recipe = common_options.read_recipe(path, [*settings, *cell.overrides], strategy)
    if cell.accumulation is not None:
        recipe = recipe.replace(batch=recipe.batch.replace(shards=None, accumulation=cell.accumulation))
    # Called for its errors: a strategy that cannot run is refused before any run starts.
    common_options.processes_for(recipe, None, 1)
    return recipe


def with_evaluation_interval(recipe: Recipe, base_batch: int) -> Recipe:
    """Return a recipe that evaluates after the same number of samples in every run.

    Without it the runs of a sweep over batch sizes would reach a target at steps that cannot be compared.
    """
    if recipe.evaluate.every_steps:
        return recipe
    every = max(1, _EVALUATE_EVERY * base_batch // recipe.batch.size)
    return recipe.replace(evaluate=recipe.evaluate.replace(every_steps=every))


def refuse_other_recipes(runs: Sequence[StudyRun]) -> None:
    """Raise a RecipeError if the folder of a run holds a run of another recipe."""
    for run in runs:
        path = run.folder / RESOLVED_RECIPE
        text = None if run.recipe is None else resolved_text(run.recipe)
        if text is not None and path.exists() and path.read_text("utf-8") != text:
            raise RecipeError(
                "the folder holds a run of another recipe",
                where=str(path),
                next_step="choose another --out, or use the same recipe and settings as the first time",
            )


def resolved_text(recipe: Recipe) -> str:
    """Return the text of a resolved recipe, which names no run folder."""
    from paceline.recipe.recipe import to_toml

    return to_toml(recipe.replace(run_dir=None))


def train_all(
    runs: Sequence[StudyRun],
    log: Callable[[str], None],
    on_end: Callable[[StudyRun], None] = lambda run: None,
    variables: Mapping[str, str] | None = None,
) -> tuple[CompletedRuns, dict[str, str], int]:
    """Train all runs that are not complete; a run that fails is reported, and the next one starts.

    Args:
        log: prints a line.
        on_end: called when a run has ended, well or not.
        variables: of a fork server of the caller; None: one is started if there are several runs.
    Returns:
        The completed runs, the reasons of the failed ones by label, and the exit code: 0, 1, or that of a
        stop request.
    """
    with ExitStack() as stack:
        several = sum(not run.complete and run.recipe is not None for run in runs) > 1
        # importing takes longer than a short run: with several, a fork server pays for it once
        if variables is None:
            variables = stack.enter_context(fork_server(TRAIN_MODULES)) if several else {}
        return _train_all(runs, log, {**process_environment(), **variables}, on_end)


def collect_runs(runs: Sequence[StudyRun]) -> tuple[CompletedRuns, dict[str, str], int]:
    """Return what `train_all` returns, for runs that an engine trains; those that are not complete failed."""
    done: CompletedRuns = []
    failed: dict[str, str] = {}
    for run in runs:
        if not run.complete and run.status != "finished":
            failed[run.cell.label] = run.refusal or f"it is not complete: {run.status}"
            continue
        (run.folder / _COMPLETE).touch()
        done.append((run.cell, read_measurements(run.folder)))
    return done, failed, int(bool(failed))


def train_run(run: StudyRun) -> tuple[str, int]:
    """Train one run if it is not complete.

    Returns:
        Why it failed, empty if it did not, and its exit code.
    """
    return ("", 0) if run.complete else _train(run, process_environment())


def _train_all(
    runs: Sequence[StudyRun],
    log: Callable[[str], None],
    environ: Mapping[str, str],
    on_end: Callable[[StudyRun], None],
) -> tuple[CompletedRuns, dict[str, str], int]:
    done: CompletedRuns = []
    failed: dict[str, str] = {}
    for i, run in enumerate(runs, 1):
        log(f"[{i}/{len(runs)}] {run.cell.label}{': already complete' if run.complete else ''}")
        reason, code = ("", 0) if run.complete else _train(run, environ)
        # The user has stopped the study, not only this run.
        if code in STOPPED_EXIT_CODES:
            log("stopped; to continue, run the same command with --out")
            return done, failed, code
        if reason:
            failed[run.cell.label] = reason
            log(f"  failed: {reason}")
        else:
            done.append((run.cell, read_measurements(run.folder)))
            log(f"  {_result_text(done[-1][1])}")
        on_end(run)
    return done, failed, int(bool(failed))


def _train(run: StudyRun, environ: Mapping[str, str]) -> tuple[str, int]:
    """Train one run as an ordinary job; returns why it failed (empty if it did not) and its exit code."""
    if run.recipe is None:
        return run.refusal, RecipeError.exit_code
    run.folder.mkdir(parents=True, exist_ok=True)
    resumes = any((run.folder / "checkpoints").glob("step-*/manifest.json"))
    if not resumes:  # an attempt without a checkpoint starts again, so its measurements would count twice
        for name in (METRICS, RECIPE):
            (run.folder / name).unlink(missing_ok=True)
    words = ["train", str(write_resolved_recipe(run, run.recipe)), *_run_folder_options(run, resumes)]
    code, report = _run_in_lab(run, words) if run.lab else _run_here(run, words, environ)
    if code:
        return report.partition("\n")[0] or f"exit code {code}", code
    # Last, so that a run which was interrupted is never taken for a complete one.
    (run.folder / _COMPLETE).touch()
    return "", 0


def write_resolved_recipe(run: StudyRun, recipe: Recipe) -> Path:
    """Write the resolved recipe to the run's folder; returns its path."""
    path = run.folder / RESOLVED_RECIPE
    path.write_text(resolved_text(recipe), encoding="utf-8")
    return path


def _run_here(run: StudyRun, words: Sequence[str], environ: Mapping[str, str]) -> tuple[int, str]:
    """Run a job on this machine; returns its exit code and the report of a failure."""
    assert run.recipe is not None, "the caller has checked it"
    report: list[str] = []
    job = LaunchJob(
        (sys.executable, "-m", "paceline", *words),
        common_options.processes_for(run.recipe, None, 1),
        threads=run.recipe.runtime.threads,
        log_dir=run.folder / "logs",
        output="logged",
        timeouts=ShutdownTimeouts(grace_seconds=run.recipe.checkpoint.grace_seconds),
    )
    return launch(job, environ=environ, log=report.append).exit_code, "".join(report)


def _run_in_lab(run: StudyRun, words: Sequence[str]) -> tuple[int, str]:
    """Run a job over the hosts of a lab; a stop request gives exit code 130, as on this machine."""
    log_file = run.folder / "logs" / "lab.log"
    log_file.parent.mkdir(parents=True, exist_ok=True)
    with log_file.open("w", encoding="utf-8") as stream:
        try:
            done = subprocess.run(run_command(run, words), stdout=stream, stderr=stream, check=False)
        except KeyboardInterrupt:
            return STOPPED_EXIT_CODES[1], ""
    text = log_file.read_text("utf-8", errors="replace")
    # A lab gives no report, so the first line of a host that looks like an error is the reason.
    reasons = [line for line in text.splitlines() if " error: " in f" {line}" or "raised" in line]
    return done.returncode, (reasons or [""])[0]


def run_command(run: StudyRun, words: Sequence[str]) -> list[str]:
    """Return the command `paceline WORDS` with the processes of a run, in its lab if it has one."""
    assert run.recipe is not None, "the caller has checked it"
    whole = [*words, "-n", str(common_options.processes_for(run.recipe, None, 1))]
    base = [sys.executable, "-m", "paceline"]
    return [*base, "lab", "run", *run.lab, "--", "paceline", *whole] if run.lab else [*base, *whole]


def _run_folder_options(run: StudyRun, resumes: bool) -> tuple[str, str]:
    from paceline.recipe.toml_text import toml_value

    if resumes:
        return "--resume", str(run.folder)
    return "--set", f"run_dir={toml_value(str(run.folder.resolve()))}"


def _result_text(run: RunMeasurements) -> str:
    last = run.points[-1].values if run.points else {}
    values = "  ".join(f"{name} {value:.4g}" for name, value in last.items())
    return (
        f"{format_count(run.steps, 'step')} in {run.seconds:.1f} s, {run.samples_per_second:.0f} samples/s"
        f"  {values}".rstrip()
    )
