"""`paceline sweep`: train one recipe under several settings, one job after the other, or find its rate."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import common_options
from paceline.cli.console import error_output, output, print_json, print_plain
from paceline.errors import NumericError, RecipeError

if TYPE_CHECKING:
    from paceline.studies.learning_rate_curve import LearningRateCurve, LearningRateRange
    from paceline.studies.sweep_summary import SweepSummary

Over = Annotated[
    list[str] | None,
    typer.Option(
        "--over",
        help="One axis: batch=32,64, replicas=1,2, accumulation=1,2, seed=1,2 or optimizer.lr=1e-3,1e-2."
        " Repeatable.",
    ),
]


FindRate = Annotated[
    bool,
    typer.Option(
        "--find-lr", help="Instead: one run in which the learning rate rises, a curve, and a suggestion."
    ),
]
RateRange = Annotated[
    str | None,
    typer.Option(
        "--lr-range", help="With --find-lr: LOW,HIGH of the rate. Default: 1e-6,1.", show_default=False
    ),
]
RateSteps = Annotated[
    int | None,
    typer.Option(
        "--lr-steps", help="With --find-lr: updates from LOW to HIGH. Default: 100.", show_default=False
    ),
]


Collect = Annotated[
    bool,
    typer.Option(
        "--collect", help="Train nothing: the results of the runs in --out that are complete (a job array)."
    ),
]


def sweep(
    recipe: common_options.RecipeArgument,
    over: Over = None,
    find_lr: FindRate = False,
    lr_range: RateRange = None,
    lr_steps: RateSteps = None,
    strategy: common_options.StrategyOption = None,
    settings: common_options.Settings = None,
    target: common_options.TargetOption = None,
    out: common_options.Out = None,
    collect: Collect = False,
    as_json: common_options.AsJson = False,
) -> None:
    """Train RECIPE for every combination of some settings; write a table, a plot and results.json."""
    from paceline.job.cluster import current_place, refuse_engine_tasks

    refuse_engine_tasks(current_place(), "paceline sweep")
    _check_options(over, find_lr, lr_range is not None or lr_steps is not None, target)
    if collect and (find_lr or out is None):
        raise RecipeError(
            "--collect reads the runs of a sweep",
            next_step="name its folder by --out, and its axes by --over",
        )
    folder = out or Path("sweeps") / f"{datetime.now():%Y%m%d-%H%M%S}-{recipe.stem}"
    if find_lr:
        from paceline.studies.learning_rate_curve import LearningRateRange

        rates = LearningRateRange.parse(lr_range or "1e-6,1", 100 if lr_steps is None else lr_steps)
        find_rate(RateSearch(recipe, strategy, tuple(settings or ()), rates, folder), as_json)
        return
    from paceline.cli.study_runs import collect_runs, plan_runs, train_all
    from paceline.studies.sweep_cells import build_cells, parse_axis
    from paceline.studies.sweep_summary import MetricTarget, render_table, summarize_sweep

    metric_target = MetricTarget.parse(target) if target is not None else None
    cells = build_cells([parse_axis(text) for text in over or ()])
    console = error_output() if as_json else output()
    runs = plan_runs(recipe, settings or [], strategy, cells, folder)
    done, failed, code = (
        collect_runs(runs) if collect else train_all(runs, lambda line: print_plain(line, console))
    )
    summary = summarize_sweep(done, failed, metric_target)
    _save_results(summary, folder)
    if as_json:
        print_json(summary.to_json())
    for line in (*render_table(summary), *_file_lines(folder)):
        print_plain(line, console)
    sys.exit(code)


def _check_options(over: list[str] | None, find_lr: bool, has_rates: bool, target: str | None) -> None:
    """Refuse options that have no effect, and a sweep over nothing."""
    if find_lr and (over or target is not None):
        raise RecipeError(
            "--find-lr is one run: --over and --target have no effect", next_step="leave them out"
        )
    if not find_lr and has_rates:
        raise RecipeError(
            "--lr-range and --lr-steps have no effect without --find-lr", next_step="add --find-lr"
        )
    if not find_lr and not over:
        raise RecipeError(
            "a sweep needs at least one axis",
            next_step='for example --over "batch=32,64"; or --find-lr for a learning rate',
        )


@dataclass(frozen=True)
class RateSearch:
    """A search for a learning rate: the recipe with its settings, the rates, and the output folder."""

    recipe: Path
    strategy: str | None
    settings: tuple[str, ...]
    rates: LearningRateRange
    folder: Path


def find_rate(search: RateSearch, as_json: bool) -> None:
    """Train one run in which the rate rises; write the curve and the suggestion, or exit with its error.

    A loss that is not finite ends the run, and the curve: that is what large rates are expected to do.
    """
    from paceline.cli.study_runs import StudyRun, refuse_other_recipes, train_run
    from paceline.report.run_reader import read_run
    from paceline.studies.learning_rate_curve import find_learning_rate
    from paceline.studies.sweep_cells import SweepCell

    rates, console = search.rates, error_output() if as_json else output()
    recipe = common_options.read_recipe(search.recipe, [*search.settings, *rates.overrides], search.strategy)
    common_options.processes_for(recipe, None, 1)  # for its errors, before the run starts
    cell = SweepCell({"lr": f"{rates.low:g}..{rates.high:g}"})
    run_dir = search.folder / cell.folder
    run = StudyRun(cell, run_dir, recipe.replace(run_dir=str(run_dir.resolve())))
    refuse_other_recipes([run])
    print_plain(f"{rates.steps} steps, rates from {rates.low:g} to {rates.high:g}", console)
    reason, code = train_run(run)
    if code not in (0, NumericError.exit_code):
        print_plain(f"failed: {reason}", error_output())
        sys.exit(code)
    curve = find_learning_rate(read_run(run_dir).steps, rates, reason)
    lines = _save_curve(curve, search.folder)
    if as_json:
        print_json(curve.to_json())
    for line in (*lines, *_file_lines(search.folder)):
        print_plain(line, console)


def _save_curve(curve: LearningRateCurve, folder: Path) -> list[str]:
    """Write the files of a search; returns the lines of the table."""
    from paceline.studies.learning_rate_curve import render_curve_plot, render_curve_table

    lines = render_curve_table(curve)
    _write_files(folder, json.dumps(curve.to_json(), indent=1), lines, render_curve_plot(curve))
    return lines


def _save_results(summary: SweepSummary, folder: Path) -> None:
    from paceline.studies.sweep_plot import render_plot
    from paceline.studies.sweep_summary import render_table

    table = render_table(summary)
    _write_files(folder, json.dumps(summary.to_json(), indent=1), table, render_plot(summary))


def _write_files(folder: Path, results: str, table: Sequence[str], plot: str) -> None:
    files = {"results.json": results + "\n", "table.txt": "\n".join(table) + "\n", "plot.svg": plot}
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")


def _file_lines(folder: Path) -> list[str]:
    return [f"results: {folder / 'results.json'}", f"plot:    {folder / 'plot.svg'}"]
