"""The runs of `paceline compare`: one recipe with several strategies and seeds, and their measurements.

For some seeds of each strategy one more run is made, in which a worker is killed. A strategy that is not
possible is reported, and the others run.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from paceline.cli import common_options
from paceline.cli.console import print_json, print_plain
from paceline.cli.kill_trial import kill_and_recover
from paceline.cli.study_runs import StudyRun, refuse_other_recipes, train_all, with_evaluation_interval
from paceline.errors import RecipeError, format_count
from paceline.recipe.recipe import max_sharers
from paceline.recipe.strategy import Strategy
from paceline.recipe.support import fill_replicas, num_ranks, support
from paceline.report.html_page import ComparisonTable, render_comparison_page
from paceline.report.run_reader import read_run
from paceline.studies.comparison_trials import (
    ComparisonEntry,
    KillRecovery,
    measure_trial,
    parse_comparison_entries,
    read_recovery,
)
from paceline.studies.strategy_comparison import (
    StrategyComparison,
    StrategyTrials,
    compare_strategies,
    render_comparison,
    render_costs_table,
    render_properties_table,
    render_results_table,
)
from paceline.studies.sweep_cells import SweepCell
from paceline.studies.sweep_summary import MetricTarget

EXTRA_TERMS = (
    *("codec=int8", "route=tree", "lanes=2", "balance=speed", "shard=2 zero=1", "shard=2 zero=3"),
    *("tensor=2", "pipeline=2"),
)
"""Terms that are combined with every strategy, to see which of them it supports."""


@dataclass(frozen=True)
class PlannedStrategy:
    """One strategy of the file.

    Args:
        strategy: the resolved strategy; empty if it is not possible.
        runs: one for each seed.
        goes_with: the terms of `EXTRA_TERMS` that it supports.
    """

    name: str
    strategy: str
    runs: Sequence[StudyRun]
    goes_with: Sequence[str]


def plan_comparison(
    path: Path,
    settings: Sequence[str],
    entries: Sequence[ComparisonEntry],
    seeds: int,
    folder: Path,
    lab: tuple[str, ...] = (),
) -> list[PlannedStrategy]:
    """Resolve the recipe of every run.

    Raises:
        RecipeError: the recipe is wrong, no strategy is possible, or the folder holds runs of other recipes.
    """
    base_batch = common_options.read_recipe(path, list(settings), None).batch.size
    runs = [
        [_resolve(path, settings, entry, seed, base_batch, folder, lab) for seed in range(1, seeds + 1)]
        for entry in entries
    ]
    if not any(run.recipe for members in runs for run in members):
        raise RecipeError(
            f"none of the strategies is supported; the first one: {runs[0][0].refusal}", where="--strategies"
        )
    for members in runs:
        refuse_other_recipes(members)
    return [_plan_strategy(entry.name, members) for entry, members in zip(entries, runs, strict=True)]


def _resolve(
    path: Path,
    settings: Sequence[str],
    entry: ComparisonEntry,
    seed: int,
    base_batch: int,
    folder: Path,
    lab: tuple[str, ...],
) -> StudyRun:
    cell = SweepCell({"strategy": entry.name, "seed": str(seed)})
    run_dir = folder / f"{entry.name}_seed={seed}"
    try:
        recipe = common_options.read_recipe(
            path, [*settings, *entry.settings, f"seed={seed}"], entry.strategy
        )
        common_options.processes_for(recipe, None, 1)
    except RecipeError as error:
        return StudyRun(cell, run_dir, None, error.what)
    recipe = with_evaluation_interval(recipe, base_batch).replace(run_dir=str(run_dir.resolve()))
    return StudyRun(cell, run_dir, recipe, lab=lab)


def _plan_strategy(name: str, runs: Sequence[StudyRun]) -> PlannedStrategy:
    recipes = [run.recipe for run in runs if run.recipe is not None]
    if not recipes:
        return PlannedStrategy(name, "", runs, ())
    strategy = recipes[0].strategy
    return PlannedStrategy(name, str(strategy), runs, _compatible_terms(strategy, *max_sharers(recipes[0])))


def _compatible_terms(strategy: Strategy, shards: int, limit_key: str) -> list[str]:
    """Return the extra terms that a strategy supports in addition to its own."""
    compatible = []
    for terms in EXTRA_TERMS:
        changes = dict(term.split("=") for term in terms.split())
        more = strategy.replace(**{k: int(v) if v.isdigit() else v for k, v in changes.items()})
        filled = fill_replicas(more, num_ranks(more))
        if support(filled, processes=num_ranks(filled), shards=shards, limit_key=limit_key).ok:
            compatible.append(terms)
    return compatible


def parse_lab_options(text: str) -> tuple[str, ...]:
    """Convert "hosts=4 rate=100mbit" to options of `paceline lab run`.

    Raises:
        RecipeError: a word is not NAME=VALUE.
    """
    options: list[str] = []
    for word in text.split():
        name, equals, value = word.partition("=")
        if not (name.isalpha() and equals and value):
            raise RecipeError(
                f"expected NAME=VALUE, found '{word}'",
                where="--lab",
                next_step='use options of `paceline lab run`: --lab "hosts=4 rate=100mbit latency=2ms"',
            )
        options += [f"--{name}", value]
    return tuple(options)


_INTERRUPTED_EXIT_CODE = 130
COMPARISON_PAGE = "compared.html"


@dataclass(frozen=True)
class CompareArgs:
    """The arguments of `paceline compare`, as the user gave them."""

    recipe: Path
    strategies: Path
    lab: str
    seeds: int
    kills: int
    settings: list[str]
    target: str | None
    out: Path | None
    as_json: bool


def run_compare(args: CompareArgs) -> None:
    """Train with every strategy over seeds, and write the results; exits with the exit code."""
    recipe, seeds, lab = args.recipe, args.seeds, args.lab
    target = MetricTarget.parse(args.target) if args.target is not None else None
    entries = parse_comparison_entries(_read(args.strategies), str(args.strategies))
    folder = args.out or Path("compared") / f"{datetime.now():%Y%m%d-%H%M%S}-{recipe.stem}"
    planned = plan_comparison(recipe, args.settings, entries, seeds, folder, parse_lab_options(lab))
    console = Console(stderr=args.as_json)
    code, failed = _train(planned, min(args.kills, seeds), console)
    comparison = compare_strategies([_strategy_trials(strategy, failed) for strategy in planned], target)
    about = f"{recipe.name}, {format_count(seeds, 'seed')}{', lab ' + lab if lab else ''}"
    _save_results(comparison, planned, folder, about)
    if args.as_json:
        print_json(comparison.to_json())
    for line in [
        *render_comparison(comparison),
        f"results: {folder / 'results.json'}",
        f"page:    {folder / COMPARISON_PAGE}",
    ]:
        print_plain(line, console)
    sys.exit(code)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"cannot read the strategies: {error}", where=str(path)) from error


def _train(planned: Sequence[PlannedStrategy], kills: int, console: Console) -> tuple[int, dict[str, str]]:
    """Train all runs that are not complete; returns the exit code, and failures by label."""
    runs = [run for strategy in planned for run in strategy.runs]
    with progress_log(len(runs) + kills * len(planned), console) as progress:
        done, failed, code = train_all(runs, progress.log, progress.advance)
        # The user has stopped the training, so no worker is killed either.
        if len(done) + len(failed) < len(runs):
            return code, failed
        try:
            for strategy in planned:
                for run in strategy.runs[:kills]:
                    progress.log(f"killing a worker of {run.cell.label}")
                    progress.kill(run)
        except KeyboardInterrupt:
            progress.log("stopped; to continue, run the same command with --out")
            return _INTERRUPTED_EXIT_CODE, failed
    return code, failed


@contextmanager
def progress_log(total: int, console: Console) -> Iterator[ProgressLog]:
    """Show a progress bar over a number of runs, on standard error, since standard output can be JSON.

    Args:
        console: for the lines above the bar.
    """
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        yield ProgressLog(bar, total, console)


@dataclass
class ProgressLog:
    """Log lines above a progress bar, whose description is the current run."""

    bar: Progress
    total: int
    console: Console

    def __post_init__(self) -> None:
        self._task = self.bar.add_task("", total=self.total)

    def log(self, line: str) -> None:
        """Print a line above the bar."""
        # results are indented; other lines say what runs now
        if not line.startswith(" "):
            self.bar.update(self._task, description=line)
        print_plain(line, self.console)

    def advance(self, run: StudyRun) -> None:
        """Count a run that has ended."""
        self.bar.advance(self._task)

    def kill(self, run: StudyRun) -> None:
        """Repeat a completed run, kill a worker in it, and measure the recovery."""
        recovery = None
        if run.complete:
            num_steps = int(read_run(run.folder).steps[-1]["step"]) + 1
            recovery = kill_and_recover(run, num_steps, _kill_folder(run))
        self.log(f"  {_recovery_text(recovery)}")
        self.bar.advance(self._task)


def _kill_folder(run: StudyRun) -> Path:
    return run.folder.with_name(f"{run.folder.name}_killed")


def _recovery_text(recovery: KillRecovery | None) -> str:
    if recovery is None:
        return "not measured: the run ended before the kill, or never ran"
    seconds = "" if recovery.seconds is None else f" after {recovery.seconds:.1f} s"
    return f"{recovery.how}{seconds}, {format_count(recovery.steps_again, 'step')} repeated"


def _strategy_trials(planned: PlannedStrategy, failed: dict[str, str]) -> StrategyTrials:
    complete = [run for run in planned.runs if run.complete]
    recoveries = [read_recovery(_kill_folder(run)) for run in planned.runs]
    return StrategyTrials(
        name=planned.name,
        strategy=planned.strategy,
        planned=len(planned.runs),
        trials=[measure_trial(read_run(run.folder)) for run in complete],
        recovery=[recovery for recovery in recoveries if recovery is not None],
        goes_with=planned.goes_with,
        tried=EXTRA_TERMS,
        failed=[failed[run.cell.label] for run in planned.runs if run.cell.label in failed],
    )


_TABLE_CAPTIONS = {
    "learned": "Means over the seeds, ± their standard deviation. A target is checked at each evaluation.",
    "costs": "Idle: share of the time in which processes that compute gradients were not computing, reading"
    " data or updating. Bytes: sum over all processes. Staleness: updates between reading the parameters and"
    " applying the gradient, for rules that record it. Memory: the largest process, including Python and"
    " PyTorch. After a kill: time from the SIGKILL of the last rank to the first new step.",
    "nine": "Flexibility: how many of the extra terms the strategy supports.",
}


def _save_results(
    comparison: StrategyComparison, planned: Sequence[PlannedStrategy], folder: Path, about: str
) -> None:
    tables = [
        ComparisonTable("What was learned", _TABLE_CAPTIONS["learned"], *render_results_table(comparison)),
        ComparisonTable("What it cost", _TABLE_CAPTIONS["costs"], *render_costs_table(comparison)),
        ComparisonTable("Nine rows of each", _TABLE_CAPTIONS["nine"], *render_properties_table(comparison)),
    ]
    groups = {
        strategy.name: [read_run(run.folder) for run in strategy.runs if run.complete] for strategy in planned
    }
    files = {
        "results.json": json.dumps(comparison.to_json(), indent=1) + "\n",
        "table.txt": "\n".join(render_comparison(comparison)) + "\n",
        COMPARISON_PAGE: render_comparison_page(
            f"{'1 strategy' if len(planned) == 1 else f'{len(planned)} strategies'} compared",
            about,
            tables,
            groups,
        ),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
