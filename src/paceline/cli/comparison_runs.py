"""The runs of a comparison: one for each strategy and seed, and one more in which a worker is killed.

`paceline compare`: one recipe under several strategies and seeds, and what each has measured.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from paceline.cli import common_options
from paceline.cli.console import output
from paceline.cli.kill_trial import kill_and_recover
from paceline.cli.study_runs import StudyRun, refuse_other_recipes, train_all, with_evaluation_interval
from paceline.errors import RecipeError
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
"""Terms of which every strategy is asked whether it goes with them."""


@dataclass(frozen=True)
class PlannedStrategy:
    """One strategy of the file.

    Args:
        strategy: in full; empty where it cannot be.
        runs: one for each seed.
        goes_with: those of `EXTRA_TERMS` that it accepts.
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
    """Resolve every run before any is trained; a strategy that cannot be is told, and the rest goes on.

    Raises:
        RecipeError: the recipe is wrong, no strategy is possible, or the folder holds runs of other recipes.
    """
    usual = common_options.read_recipe(path, list(settings), None).batch.size
    runs = [
        [_resolve(path, settings, entry, seed, usual, folder, lab) for seed in range(1, seeds + 1)]
        for entry in entries
    ]
    if not any(run.recipe for members in runs for run in members):
        raise RecipeError(f"no strategy can run; the first: {runs[0][0].refusal}", where="--strategies")
    for members in runs:
        refuse_other_recipes(members)
    return [_plan_strategy(entry.name, members) for entry, members in zip(entries, runs, strict=True)]


def _resolve(
    path: Path,
    settings: Sequence[str],
    entry: ComparisonEntry,
    seed: int,
    usual: int,
    folder: Path,
    lab: tuple[str, ...],
) -> StudyRun:
    cell = SweepCell({"strategy": entry.name, "seed": str(seed)})
    place = folder / f"{entry.name}_seed={seed}"
    try:
        recipe = common_options.read_recipe(
            path, [*settings, *entry.settings, f"seed={seed}"], entry.strategy
        )
        common_options.processes_for(recipe, None, 1)
    except RecipeError as error:
        return StudyRun(cell, place, None, error.what)
    recipe = with_evaluation_interval(recipe, usual).replace(run_dir=str(place.resolve()))
    return StudyRun(cell, place, recipe, lab=lab)


def _plan_strategy(name: str, runs: Sequence[StudyRun]) -> PlannedStrategy:
    recipes = [run.recipe for run in runs if run.recipe is not None]
    if not recipes:
        return PlannedStrategy(name, "", runs, ())
    strategy = recipes[0].strategy
    return PlannedStrategy(name, str(strategy), runs, _compatible_terms(strategy, *max_sharers(recipes[0])))


def _compatible_terms(strategy: Strategy, shards: int, called: str) -> list[str]:
    """The terms that it accepts beside its own."""
    found = []
    for terms in EXTRA_TERMS:
        changes = dict(term.split("=") for term in terms.split())
        more = strategy.replace(**{k: int(v) if v.isdigit() else v for k, v in changes.items()})
        filled = fill_replicas(more, num_ranks(more))
        if support(filled, processes=num_ranks(filled), shards=shards, called=called).ok:
            found.append(terms)
    return found


def parse_lab_options(text: str) -> tuple[str, ...]:
    """`hosts=4 rate=100mbit` as the options of `paceline lab run`.

    Raises:
        RecipeError: a word is no NAME=VALUE.
    """
    found: list[str] = []
    for word in text.split():
        name, equals, value = word.partition("=")
        if not (name.isalpha() and equals and value):
            raise RecipeError(
                f"expected NAME=VALUE, found '{word}'",
                where="--lab",
                next_step='options of `paceline lab run`, as in --lab "hosts=4 rate=100mbit latency=2ms"',
            )
        found += [f"--{name}", value]
    return tuple(found)


_INTERRUPTED_EXIT_CODE = 130
COMPARISON_PAGE = "compared.html"


class CompareArgs(NamedTuple):
    """The words of the command; see `paceline compare --help`."""

    recipe: Path
    strategies: Path
    lab: str
    seeds: int
    kills: int
    settings: list[str]
    target: str | None
    out: Path | None


def run_compare(asked: CompareArgs, *, as_json: bool) -> None:
    """Train under every strategy, over seeds; tables and a page hold what was measured."""
    recipe, seeds, lab = asked.recipe, asked.seeds, asked.lab
    wanted = MetricTarget.parse(asked.target) if asked.target is not None else None
    entries = parse_comparison_entries(_read(asked.strategies), str(asked.strategies))
    folder = asked.out or Path("compared") / f"{datetime.now():%Y%m%d-%H%M%S}-{recipe.stem}"
    planned = plan_comparison(recipe, asked.settings, entries, seeds, folder, parse_lab_options(lab))
    console = Console(stderr=as_json)
    code, failed = _train(planned, min(asked.kills, seeds), console)
    found = compare_strategies([_strategy_trials(one, failed) for one in planned], wanted)
    about = f"{recipe.name}, {seeds} seed{'s' if seeds > 1 else ''}{', lab ' + lab if lab else ''}"
    _save_results(found, planned, folder, about)
    if as_json:
        output().print_json(json.dumps(found.to_json()))
    for line in [
        *render_comparison(found),
        f"results: {folder / 'results.json'}",
        f"page:    {folder / COMPARISON_PAGE}",
    ]:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    sys.exit(code)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"the strategies cannot be read: {error}", where=str(path)) from error


def _train(planned: Sequence[PlannedStrategy], kills: int, console: Console) -> tuple[int, dict[str, str]]:
    """All that is not done yet, behind a bar on standard error; the exit code, and why runs have failed."""
    runs = [run for one in planned for run in one.runs]
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        watched = _ProgressLog(bar, len(runs) + kills * len(planned), console)
        done, failed, code = train_all(runs, watched.say, watched.over)
        if len(done) + len(failed) < len(runs):
            return code, failed
        try:
            for one in planned:
                for run in one.runs[:kills]:
                    watched.say(f"a worker of {run.cell.label} is killed")
                    watched.kill(run)
        except KeyboardInterrupt:
            watched.say("stopped: the same command with --out goes on from here")
            return _INTERRUPTED_EXIT_CODE, failed
    return code, failed


@dataclass
class _ProgressLog:
    """Says what happens, and moves the bar."""

    bar: Progress
    total: int
    console: Console

    def __post_init__(self) -> None:
        self._task = self.bar.add_task("", total=self.total)

    def say(self, line: str) -> None:
        """One line above the bar; what begins without a space is what is done now."""
        if not line.startswith(" "):
            self.bar.update(self._task, description=line)
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def over(self, run: StudyRun) -> None:
        """A run has ended."""
        self.bar.advance(self._task)

    def kill(self, run: StudyRun) -> None:
        """Measure the recovery of a run that has been trained."""
        found = None
        if run.complete:
            found = kill_and_recover(run, _steps(run), _kill_folder(run))
        self.say(f"  {_recovery_text(found)}")
        self.bar.advance(self._task)


def _steps(run: StudyRun) -> int:
    return int(read_run(run.folder).steps[-1]["step"]) + 1


def _kill_folder(run: StudyRun) -> Path:
    return run.folder.with_name(f"{run.folder.name}_killed")


def _recovery_text(found: KillRecovery | None) -> str:
    if found is None:
        return "it was over before, or never ran"
    seconds = "" if found.seconds is None else f" after {found.seconds:.1f} s"
    return f"{found.how}{seconds}, {found.steps_again} steps again"


def _strategy_trials(one: PlannedStrategy, failed: dict[str, str]) -> StrategyTrials:
    complete = [run for run in one.runs if run.complete]
    recovery = [read_recovery(_kill_folder(run)) for run in one.runs]
    return StrategyTrials(
        name=one.name,
        strategy=one.strategy,
        planned=len(one.runs),
        trials=[measure_trial(read_run(run.folder)) for run in complete],
        recovery=[found for found in recovery if found is not None],
        goes_with=one.goes_with,
        tried=EXTRA_TERMS,
        failed=[failed[run.cell.label] for run in one.runs if run.cell.label in failed],
    )


_TABLE_CAPTIONS = {
    "learned": "Means over the seeds, ± their standard deviation. A target is looked at whenever a run was"
    " evaluated.",
    "costs": "Idle: share of the time in which processes that compute gradients neither did that, nor read,"
    " nor updated. Bytes are those of all processes. Staleness: updates between reading parameters and"
    " applying the gradient, of rules that note it. Memory: the largest process, with Python and"
    " PyTorch in it. After a kill: from SIGKILL of the last rank to the first step beyond those that were"
    " done.",
    "nine": "Flexibility: further terms that the strategy goes with, of those that were asked.",
}


def _save_results(
    found: StrategyComparison, planned: Sequence[PlannedStrategy], folder: Path, about: str
) -> None:
    """The same, as files."""
    tables = [
        ComparisonTable("What was learned", _TABLE_CAPTIONS["learned"], *render_results_table(found)),
        ComparisonTable("What it cost", _TABLE_CAPTIONS["costs"], *render_costs_table(found)),
        ComparisonTable("Nine rows of each", _TABLE_CAPTIONS["nine"], *render_properties_table(found)),
    ]
    groups = {one.name: [read_run(run.folder) for run in one.runs if run.complete] for one in planned}
    files = {
        "results.json": json.dumps(found.to_json(), indent=1) + "\n",
        "table.txt": "\n".join(render_comparison(found)) + "\n",
        COMPARISON_PAGE: render_comparison_page(f"{len(planned)} strategies compared", about, tables, groups),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
