"""`paceline study optimizers`: optimizers, schedules, number formats and batch sizes compared on one task.

Every run is one of `paceline sweep`, in a folder of its own, so the same command continues after a stop.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import common_options
from paceline.cli.console import error_output, output, print_json, print_plain
from paceline.errors import NumericError, RecipeError

if TYPE_CHECKING:
    from paceline.cli.comparison_runs import ProgressLog
    from paceline.cli.study_runs import StudyRun
    from paceline.recipe.recipe import Recipe
    from paceline.studies.optimizer_study import ChosenRate, StudyPart, StudySize
    from paceline.studies.sweep_cells import SweepCell
    from paceline.studies.sweep_summary import SweepSummary

STUDY_PAGE = "study.html"

RecipeFile = Annotated[
    Path | None,
    typer.Argument(
        help="Recipe with `steps`, whose optimizer and schedule are replaced. Default: an MLP on digits.",
        show_default=False,
    ),
]
Optimizers = Annotated[
    list[str] | None,
    typer.Option(
        "--optimizer",
        help="Compare this one. Repeatable. Default: sgd, adam, rmsprop, lamb, lars.",
        show_default=False,
    ),
]


def study_optimizers(
    recipe: RecipeFile = None,
    optimizers: Optimizers = None,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Seeds of each comparison, from 1.")] = 3,
    quick: Annotated[
        bool, typer.Option("--quick", help="Two optimizers, one seed, 24 steps: does it run at all?")
    ] = False,
    settings: common_options.Settings = None,
    out: common_options.Out = None,
    as_json: common_options.AsJson = False,
) -> None:
    """Compare optimizers over schedules, number formats and batch sizes; write tables, plots and a page."""
    from paceline.job.cluster import current_place, refuse_engine_tasks
    from paceline.studies.optimizer_study import QUICK, StudySize

    refuse_engine_tasks(current_place(), "paceline study optimizers")
    size = QUICK if quick else StudySize(seeds=seeds)
    if optimizers:
        size = size.compare(optimizers)
    folder = out or Path("studies") / ("optimizers-quick" if quick else "optimizers")
    study = OptimizerStudy(
        size, _recipe_file(recipe, folder), [*(settings or []), *(["steps=24"] if quick else [])], folder
    )
    parts, rates = study.run(as_json)
    lines = _save_results(study, parts, rates)
    if as_json:
        print_json(_to_json(parts, rates))
    for line in (*lines, f"page: {folder / STUDY_PAGE}"):
        print_plain(line, error_output() if as_json else output())
    sys.exit(1 if study.failures else 0)


def _recipe_file(recipe: Path | None, folder: Path) -> Path:
    """Return the recipe, which for the default one is written to the study's folder."""
    from paceline.studies.optimizer_study import DIGITS_RECIPE

    if recipe is not None:
        return recipe
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "recipe.toml"
    path.write_text(DIGITS_RECIPE, encoding="utf-8")
    return path


class OptimizerStudy:
    """The runs of a study, part after part.

    Args:
        size: what is compared.
        path: the recipe.
        settings: as `--set` takes them.
        folder: of the runs and the report.

    Attributes:
        failures: labels of runs that failed for another reason than a loss that is not finite.
        runs: all runs by part.
    Raises:
        RecipeError: the recipe has no `steps`.
    """

    def __init__(self, size: StudySize, path: Path, settings: Sequence[str], folder: Path) -> None:
        self.size, self.path, self.settings, self.folder = size, path, settings, folder
        self._variables: Mapping[str, str] = {}
        self.failures: list[str] = []
        self.runs: dict[str, list[StudyRun]] = {}
        self.recipe: Recipe = common_options.read_recipe(path, list(settings), None)
        if not self.recipe.steps:
            raise RecipeError(
                "the study needs a number of steps, of which larger batches take fewer",
                where=f"{path}: steps",
                next_step="pass --set epochs= --set steps=500",
            )

    def run(self, as_json: bool) -> tuple[list[StudyPart], dict[str, ChosenRate]]:
        """Train all runs that are not complete; exits if the user stops it."""
        from paceline.cli.comparison_runs import progress_log
        from paceline.cli.study_runs import TRAIN_MODULES
        from paceline.launch.fork_client import fork_server
        from paceline.studies import optimizer_study as study
        from paceline.studies.sweep_summary import recommend, summarize_sweep

        size, recipe = self.size, self.recipe
        console = error_output() if as_json else output()
        with (
            fork_server(TRAIN_MODULES) as self._variables,
            progress_log(size.num_runs, console) as progress,
        ):
            tried, failed = self._train("rates", study.rate_cells(size), progress)
            rates = study.choose_rates(size, tried)
            if not rates:
                raise NumericError(
                    "no rate of any optimizer gave a finite loss",
                    where=str(self.path),
                    next_step=f"look at {self.folder / 'rates'}, or choose other optimizers",
                )
            parts = [
                study.StudyPart(
                    "rates",
                    f"Rates, by the loss on {study.VALIDATION:.0%} of the training samples, seed 0",
                    summarize_sweep(tried, failed),
                    study.describe_rates(rates),
                )
            ]
            compared = self._compare("schedules", study.schedule_cells(size, rates), progress)
            parts.append(
                study.StudyPart(
                    "schedules", "Optimizers and schedules, held-out samples", compared, recommend(compared)
                )
            )
            best = study.best_setting(compared)
            formats = self._compare("formats", study.format_cells(size, rates, best), progress)
            formats = study.with_number(formats, "planned MiB", "format", self._planned_mib(study.FORMATS))
            parts.append(
                study.StudyPart(
                    "formats",
                    f"Number formats, {best['optimizer']} with {best['schedule']}",
                    formats,
                    recommend(formats),
                    _format_notes(self.folder),
                )
            )
            cells = study.batch_cells(size, rates, recipe.batch.size, recipe.steps or 0)
            done, failed = self._train("batches", cells, progress)
            batches = summarize_sweep(study.repeat_base_rows(done), failed)
            parts.append(
                study.StudyPart(
                    "batches",
                    "Batch sizes after equally many samples, with the linear and the square-root rule",
                    batches,
                    study.recommend_batches(batches),
                )
            )
        return parts, rates

    def _compare(self, name: str, cells: Sequence[SweepCell], progress: ProgressLog) -> SweepSummary:
        from paceline.studies.sweep_summary import summarize_sweep

        return summarize_sweep(*self._train(name, cells, progress))

    def _train(self, name: str, cells: Sequence[SweepCell], progress: ProgressLog) -> tuple[Any, Any]:
        """Train the runs of one part; returns those that are complete, and failures by label."""
        from paceline.cli.study_runs import plan_runs, train_all

        runs = self.runs[name] = plan_runs(self.path, self.settings, None, cells, self.folder / name)
        done, failed, code = train_all(runs, progress.log, progress.advance, self._variables)
        if len(done) + len(failed) < len(runs):
            sys.exit(code)
        self.failures += [
            f"{name} {label}" for label, why in failed.items() if NumericError.__name__ not in why
        ]
        if not done:
            raise RecipeError(f"no run of {name} is complete: {next(iter(failed.values()))}")
        return done, failed

    def _planned_mib(self, formats: Sequence[str]) -> dict[str, float]:
        """Return the tensors at the peak of a step by number format, as `paceline plan memory` has them."""
        from paceline.plan.memory_planner import plan_memory
        from paceline.session.start_rank import build_task

        planned = {}
        for run in self.runs["formats"]:
            word = run.cell.values["format"]
            if run.recipe is not None and word not in planned:
                task = build_task(run.recipe, None, common_options.task_directory(self.path))
                processes = common_options.processes_for(run.recipe, None, 1)
                planned[word] = plan_memory(run.recipe, task, processes).peak / 2**20
        return planned


def _format_notes(folder: Path) -> list[str]:
    """Return a sentence for each format without instructions of this processor."""
    from paceline.tuning.machine_facts import describe_machine

    formats = describe_machine(folder)["number_formats"]["cpu"]
    return [
        f"{word}: this processor has no instructions for it, so that its steps take longer than in fp32"
        for word in ("bf16", "fp16")
        if not formats[word]
    ]


def _to_json(parts: Sequence[StudyPart], rates: dict[str, ChosenRate]) -> dict[str, Any]:
    return {
        "rates": {word: {"lr": rate.lr, "is_edge": rate.is_edge} for word, rate in rates.items()},
        "parts": {part.name: part.to_json() for part in parts},
    }


def _save_results(
    study: OptimizerStudy, parts: Sequence[StudyPart], rates: dict[str, ChosenRate]
) -> list[str]:
    """Write the files of the study; returns the lines of its tables."""
    from paceline.report.html_page import ComparisonTable, render_comparison_page
    from paceline.report.run_reader import read_run
    from paceline.studies.sweep_plot import render_plot
    from paceline.studies.sweep_summary import render_rows, table_cells

    lines: list[str] = []
    tables = []
    for part in parts:
        lines += ["", part.title, *render_rows(part.summary), *part.notes, *part.recommendation]
        (study.folder / f"{part.name}.svg").write_text(render_plot(part.summary), encoding="utf-8")
        header, *rows = table_cells(part.summary)
        tables.append(
            ComparisonTable(part.title, "; ".join([*part.notes, *part.recommendation]), header, rows)
        )
    curves: dict[str, list[Any]] = {}
    for run in study.runs["schedules"]:
        if run.complete:
            curves.setdefault(run.cell.values["optimizer"], []).append(read_run(run.folder))
    about = f"{study.path.name}, {study.size.seeds} seeds; curves: optimizers, all schedules and seeds"
    page = render_comparison_page("Optimizers compared", about, tables, curves)
    files = {
        "results.json": json.dumps(_to_json(parts, rates), indent=1) + "\n",
        "table.txt": "\n".join(lines[1:]) + "\n",
        STUDY_PAGE: page,
    }
    for name, text in files.items():
        (study.folder / name).write_text(text, encoding="utf-8")
    return lines
