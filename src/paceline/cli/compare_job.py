"""`paceline compare`: one recipe under several strategies and seeds, and what each has measured."""

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

from paceline.cli.compare_runs import FURTHER, Planned, lab_options, plan_comparison
from paceline.cli.console import output
from paceline.cli.kill_trial import kill_and_recover
from paceline.cli.sweep_runs import Run, train_all
from paceline.errors import RecipeError
from paceline.report import Listed, read_run, render_compared
from paceline.studies import Target
from paceline.studies.comparison import Comparison, Tried, compare
from paceline.studies.comparison_table import costs, learned, nine, render
from paceline.studies.entries import parse_entries
from paceline.studies.recovery import Recovery, read_recovery
from paceline.studies.trial import measure

_INTERRUPTED = 130
PAGE = "compared.html"


class Asked(NamedTuple):
    """The words of the command; see `paceline compare --help`."""

    recipe: Path
    strategies: Path
    lab: str
    seeds: int
    kills: int
    settings: list[str]
    target: str | None
    out: Path | None


def run_compare(asked: Asked, *, as_json: bool) -> None:
    """Train under every strategy, over seeds; tables and a page hold what was measured."""
    recipe, seeds, lab = asked.recipe, asked.seeds, asked.lab
    wanted = Target.parse(asked.target) if asked.target is not None else None
    entries = parse_entries(_read(asked.strategies), str(asked.strategies))
    folder = asked.out or Path("compared") / f"{datetime.now():%Y%m%d-%H%M%S}-{recipe.stem}"
    planned = plan_comparison(recipe, asked.settings, entries, seeds, folder, lab_options(lab))
    console = Console(stderr=as_json)
    code, failed = _train(planned, min(asked.kills, seeds), console)
    found = compare([_tried(one, failed) for one in planned], wanted)
    about = f"{recipe.name}, {seeds} seed{'s' if seeds > 1 else ''}{', lab ' + lab if lab else ''}"
    _keep(found, planned, folder, about)
    if as_json:
        output().print_json(json.dumps(found.to_json()))
    for line in [*render(found), f"results: {folder / 'results.json'}", f"page:    {folder / PAGE}"]:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    sys.exit(code)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"the strategies cannot be read: {error}", where=str(path)) from error


def _train(planned: Sequence[Planned], kills: int, console: Console) -> tuple[int, dict[str, str]]:
    """All that is not done yet, behind a bar on standard error; the exit code, and why runs have failed."""
    runs = [run for one in planned for run in one.runs]
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        watched = _Watched(bar, len(runs) + kills * len(planned), console)
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
            return _INTERRUPTED, failed
    return code, failed


@dataclass
class _Watched:
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

    def over(self, run: Run) -> None:
        """A run has ended."""
        self.bar.advance(self._task)

    def kill(self, run: Run) -> None:
        """Measure the recovery of a run that has been trained."""
        found = None
        if run.complete:
            found = kill_and_recover(run, _steps(run), _kill_folder(run))
        self.say(f"  {_brief(found)}")
        self.bar.advance(self._task)


def _steps(run: Run) -> int:
    return int(read_run(run.folder).steps[-1]["step"]) + 1


def _kill_folder(run: Run) -> Path:
    return run.folder.with_name(f"{run.folder.name}_killed")


def _brief(found: Recovery | None) -> str:
    if found is None:
        return "it was over before, or never ran"
    seconds = "" if found.seconds is None else f" after {found.seconds:.1f} s"
    return f"{found.how}{seconds}, {found.steps_again} steps again"


def _tried(one: Planned, failed: dict[str, str]) -> Tried:
    complete = [run for run in one.runs if run.complete]
    recovery = [read_recovery(_kill_folder(run)) for run in one.runs]
    return Tried(
        name=one.name,
        strategy=one.strategy,
        planned=len(one.runs),
        trials=[measure(read_run(run.folder)) for run in complete],
        recovery=[found for found in recovery if found is not None],
        goes_with=one.goes_with,
        tried=FURTHER,
        failed=[failed[run.cell.label] for run in one.runs if run.cell.label in failed],
    )


_ABOUT = {
    "learned": "Means over the seeds, ± their standard deviation. A target is looked at whenever a run was"
    " evaluated.",
    "costs": "Idle: share of the time in which processes that compute gradients neither did that, nor read,"
    " nor updated. Bytes are those of all processes. Staleness: updates between reading parameters and"
    " applying the gradient, of rules that note it. Memory: the largest process, with Python and"
    " PyTorch in it. After a kill: from SIGKILL of the last rank to the first step beyond those that were"
    " done.",
    "nine": "Flexibility: further terms that the strategy goes with, of those that were asked.",
}


def _keep(found: Comparison, planned: Sequence[Planned], folder: Path, about: str) -> None:
    """The same, as files."""
    tables = [
        Listed("What was learned", _ABOUT["learned"], *learned(found)),
        Listed("What it cost", _ABOUT["costs"], *costs(found)),
        Listed("Nine rows of each", _ABOUT["nine"], *nine(found)),
    ]
    groups = {one.name: [read_run(run.folder) for run in one.runs if run.complete] for one in planned}
    files = {
        "results.json": json.dumps(found.to_json(), indent=1) + "\n",
        "table.txt": "\n".join(render(found)) + "\n",
        PAGE: render_compared(f"{len(planned)} strategies compared", about, tables, groups),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
