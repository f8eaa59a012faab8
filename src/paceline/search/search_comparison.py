"""The study of searches: grid, random and TPE on two tasks with several seeds, at equal numbers of trials.

Each cell is an ordinary study in a folder of its own, so the same command continues, and every number follows
from the logs there. Distance against improvement shows how a search spends its trials: far from the best
values so far (exploration), or near them (exploitation).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from paceline._version import VERSION
from paceline.job.cluster import process_environment
from paceline.launch.fork_client import fork_server
from paceline.recipe.recipe import Recipe
from paceline.recipe.recipe_loading import load_recipe
from paceline.report.html import Html, table, tag
from paceline.report.html_page import render_document
from paceline.search.job_executor import PRELOADED
from paceline.search.space import plan_study
from paceline.search.study import Study, StudyRequest, open_study, run_study
from paceline.search.study_report import distance
from paceline.search.study_runner import rank_trials
from paceline.studies.sweep_plot import render_svg, render_text
from paceline.studies.sweep_summary import MeanAndDeviation
from paceline.tuning.machine_facts import describe_machine

SEARCHES = ("grid", "random", "tpe")

_NEAR = 0.2
_COLORS = {"grid": "#0072b2", "random": "#d55e00", "tpe": "#009e73"}
_WIDTH, _HEIGHT, _LEFT, _TOP = 300, 200, 70, 60


@dataclass(frozen=True)
class SearchTask:
    """A task on which searches are compared.

    Args:
        recipe: TOML, without a seed.
        grid: space of the grid.
        free: space of the other searches, with the same bounds.
    """

    recipe: str
    grid: Mapping[str, Any]
    free: Mapping[str, Any]


# the grids have 20 combinations: TPE draws its first 10 trials at random
_RATE, _RATES = "optimizer.lr", {"choice": [1e-4, 5.62e-4, 3.16e-3, 1.78e-2, 1e-1]}
_BATCH = {"choice": [16, 32, 64, 128]}
TASKS: Mapping[str, SearchTask] = {
    "digits": SearchTask(
        'task = "digits"\nepochs = 4\n[options]\nhidden = [32]\n',
        {_RATE: _RATES, "batch.size": _BATCH},
        {_RATE: {"log": [1e-4, 1e-1]}, "batch.size": _BATCH},
    ),
    "text": SearchTask(
        'task = "byte-gpt"\nsteps = 60\n[options]\ncontext = 32\nlayers = 1\nheads = 2\nwidth = 32\n'
        "train_tokens = 65536\nheld_out_tokens = 8192\nsample_tokens = 0\n[batch]\nsize = 16\n"
        '[optimizer]\nname = "adamw"\n',
        {_RATE: _RATES, "schedule.warmup_steps": {"choice": [1, 10, 20, 30]}},
        {_RATE: {"log": [1e-4, 1e-1]}, "schedule.warmup_steps": {"range": [1, 30]}},
    ),
}


@dataclass(frozen=True)
class ComparisonRequest:
    """What to compare.

    Args:
        folder: of the studies and the report.
        tasks, searches: names.
        seeds: of recipe and search, from 1.
        trials: of each search.
        workers: trials at the same time.
        count_processes: see `StudyRequest`.
        report: receives a line for the user.
    """

    folder: Path
    tasks: Sequence[str]
    searches: Sequence[str]
    seeds: int
    trials: int
    workers: int
    count_processes: Callable[[Recipe], int]
    report: Callable[[str], None]


Studies = Mapping[tuple[str, str], Sequence[Study]]
"""Studies by task and search, one for each seed."""


def run_comparison(request: ComparisonRequest) -> Studies:
    """Run the studies that are not complete.

    Raises:
        RecipeError: the folder holds a comparison of other sizes.
        StudyStopped: the user has stopped it.
    """
    environ = process_environment()
    with fork_server(PRELOADED) as variables:
        cells = [
            (seed, task, search)
            for seed in range(1, request.seeds + 1)
            for task in request.tasks
            for search in request.searches
        ]
        for number, (seed, task, search) in enumerate(cells, 1):
            request.report(f"[{number}/{len(cells)}] {task}, {search}, seed {seed}")
            run_study(_cell_request(request, task, search, seed, {**environ, **variables}))
    return {
        (task, search): [
            open_study(_cell_folder(request.folder, task, search, seed))
            for seed in range(1, request.seeds + 1)
        ]
        for task in request.tasks
        for search in request.searches
    }


def _cell_folder(folder: Path, task: str, search: str, seed: int) -> Path:
    return folder / f"{task}-{search}-seed-{seed}"


def _cell_request(
    request: ComparisonRequest, task: str, search: str, seed: int, environ: Mapping[str, str]
) -> StudyRequest:
    """Return the study of a cell; its recipe is a file beside it."""
    path = request.folder / f"{task}.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(TASKS[task].recipe, encoding="utf-8")

    def load(overrides: Sequence[str], strategy: str | None) -> Recipe:
        return load_recipe(path, [f"seed={1000 * seed}", *overrides], strategy)

    table_of_study = {
        "objective": "validation loss",
        "search": search,
        "proposals": 4,
        "seed": seed,
        "validation": 0.2,
    }
    space = TASKS[task].grid if search == "grid" else TASKS[task].free
    return StudyRequest(
        plan=plan_study({"study": table_of_study, "space": space}),
        load=load,
        count_processes=request.count_processes,
        folder=_cell_folder(request.folder, task, search, seed),
        trials=request.trials,
        workers=request.workers,
        environ=environ,
    )


# ---------------------------------------------------------------------- what a search did


@dataclass(frozen=True)
class SearchPath:
    """The way of one search, trial by trial.

    Args:
        best: the best objective so far after each trial; NaN before the first value.
        distances: of each trial but the first to the best one before it, 0 to 1.
        gains: how much better than the best before it each of these was, as a share of it; 0 if it was not.
    """

    best: Sequence[float]
    distances: Sequence[float]
    gains: Sequence[float]

    @classmethod
    def of(cls, study: Study) -> SearchPath:
        """Return the way of a study."""
        best, distances, gains = [], [], []
        for number in range(1, len(study.trials) + 1):
            before = rank_trials(study.plan, study.trials[: number - 1])
            now = rank_trials(study.plan, study.trials[:number])
            value = now[0].value if now else None
            best.append(math.nan if value is None else value)
            if before and before[0].value is not None and value is not None:
                params = study.trials[number - 1].params
                distances.append(distance(study.plan.space.dimensions, before[0].params, params))
                gains.append(abs(before[0].value - value) / max(abs(before[0].value), 1e-12))
        return cls(best, distances, gains)

    def near(self, *, is_near: bool) -> list[float]:
        """Return the gains of the trials near the best so far, or of the others."""
        pairs = zip(self.distances, self.gains, strict=True)
        return [gain for away, gain in pairs if (away < _NEAR) == is_near]


def summarize_comparison(studies: Studies) -> dict[str, Any]:
    """Return the numbers of a comparison as plain values."""
    tables = {
        f"{task} {search}": {
            "best": [_best_value(study) for study in of_cell],
            "test": [None if study.tested is None else study.tested["scores"] for study in of_cell],
            "paths": [vars(SearchPath.of(study)) for study in of_cell],
            "folders": [str(study.folder) for study in of_cell],
        }
        for (task, search), of_cell in studies.items()
    }
    return {"version": VERSION, "machine": describe_machine(Path.cwd()), "searches": tables}


def _best_value(study: Study) -> float:
    best = study.best
    return math.nan if best is None or best.value is None else best.value


_RESULTS = ["task", "search", "seeds", "best validation loss", "test loss", "below random", "trial of it"]
_GAINS = ["near trials", "gain of each", "far trials", "gain of each"]
_SPENDING = ["task", "search", "distance, 1st half", "2nd half", "improved", *_GAINS]


def result_rows(studies: Studies) -> list[list[str]]:
    """Return what each search found: mean ± deviation over seeds, and its differences to random by seed."""
    rows = []
    for (task, search), of_cell in studies.items():
        best = [_best_value(study) for study in of_cell]
        tests = [study.tested["scores"]["loss"] for study in of_cell if study.tested is not None]
        random = [_best_value(study) for study in studies.get((task, "random"), ())]
        lower = sum(a < b for a, b in zip(best, random, strict=False))
        at = [study.best.number for study in of_cell if study.best is not None]
        versus = "-" if search == "random" or not random else f"{lower} of {len(random)} seeds"
        where = f"{fmean(at):.1f}" if at else "-"
        rows.append([task, search, str(len(of_cell)), _shown(best), _shown(tests), versus, where])
    return rows


def spending_rows(studies: Studies) -> list[list[str]]:
    """Return how each search spent its trials."""
    rows = []
    for (task, search), of_cell in studies.items():
        paths = [SearchPath.of(study) for study in of_cell]
        halves = [(p.distances[: len(p.distances) // 2], p.distances[len(p.distances) // 2 :]) for p in paths]
        cells = [_shown([d for half in side for d in half], 2) for side in zip(*halves, strict=True)]
        improved = sum(gain > 0 for path in paths for gain in path.gains) / len(paths)
        cells.append(f"{improved:.1f}")
        for is_near in (True, False):
            gains = [gain for path in paths for gain in path.near(is_near=is_near)]
            cells += [str(len(gains)), f"{fmean(gains):.1%}" if gains else "-"]
        rows.append([task, search, *cells])
    return rows


def _shown(values: Sequence[float], digits: int = 4) -> str:
    spread = MeanAndDeviation.of([value for value in values if math.isfinite(value)])
    return "-" if spread is None else f"{spread.mean:.{digits}g} ±{spread.deviation:.2g}"


def render_lines(studies: Studies) -> list[str]:
    """Return both tables as text."""
    lines: list[str] = []
    for head, rows in ((_RESULTS, result_rows(studies)), (_SPENDING, spending_rows(studies))):
        cells = [head, *rows]
        widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
        lines += ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells]
        lines.append("")
    return lines[:-1]


# ---------------------------------------------------------------------- plot and page


def render_search_plot(studies: Studies) -> str:
    """Return an SVG: for each task the best so far over trials, and distance against improvement."""
    tasks = list(dict.fromkeys(task for task, _ in studies))
    body: list[str] = []
    for row, task in enumerate(tasks):
        top = _TOP + row * (_HEIGHT + 80)
        paths = {s: [SearchPath.of(x) for x in cell] for (t, s), cell in studies.items() if t == task}
        body += _render_best(task, paths, _LEFT, top)
        body += _render_gains(task, paths, 2 * _LEFT + _WIDTH, top)
    for i, search in enumerate(dict.fromkeys(search for _, search in studies)):
        x = _LEFT + 90 * i
        body.append(f'<rect x="{x}" y="12" width="14" height="10" fill="{_COLORS[search]}"/>')
        body.append(render_text(x + 20, 21, search, "start"))
    width, height = 3 * _LEFT + 2 * _WIDTH, _TOP + len(tasks) * (_HEIGHT + 80)
    return render_svg(width, height, "Searches: best so far, and distance against improvement", body)


Paths = Mapping[str, Sequence[SearchPath]]


def _render_best(task: str, paths: Paths, left: int, top: int) -> list[str]:
    means = {
        search: [fmean(values) for values in zip(*(path.best for path in of_search), strict=False)]
        for search, of_search in paths.items()
    }
    finite = [value for values in means.values() for value in values if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=1.0)
    longest = max((len(values) for values in means.values()), default=1)
    elements = list(_frame(left, top, f"{task}: best validation loss so far, mean", "trial", (low, high)))
    for search, values in means.items():
        points = " ".join(
            f"{left + _WIDTH * (i + 0.5) / longest:.1f},{_up(value, low, high, top):.1f}"
            for i, value in enumerate(values)
            if math.isfinite(value)
        )
        elements.append(
            f'<polyline points="{points}" fill="none" stroke="{_COLORS[search]}" stroke-width="2"/>'
        )
    return elements


def _render_gains(task: str, paths: Paths, left: int, top: int) -> list[str]:
    points = [
        (away, gain, search)
        for search, of_search in paths.items()
        for path in of_search
        for away, gain in zip(path.distances, path.gains, strict=True)
    ]
    high = max((gain for _, gain, _ in points), default=0.0) or 1.0
    title = f"{task}: improvement of the best, as a share"
    elements = list(_frame(left, top, title, "distance to the best so far, 0 to 1", (0.0, high)))
    for away, gain, search in points:
        x, y = left + away * _WIDTH, _up(gain, 0.0, high, top)
        color = _COLORS[search]
        elements.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}" fill-opacity="0.6"/>')
    return elements


def _up(value: float, low: float, high: float, top: int) -> float:
    return top + _HEIGHT - _HEIGHT * (0.5 if high == low else (value - low) / (high - low))


def _frame(left: int, top: int, title: str, across: str, bounds: tuple[float, float]) -> Iterator[str]:
    bottom = top + _HEIGHT
    yield render_text(left + _WIDTH / 2, top - 10, title)
    yield render_text(left + _WIDTH / 2, bottom + 18, across)
    yield f'<path d="M{left} {top}V{bottom}H{left + _WIDTH}" fill="none" stroke="#888"/>'
    for value, y in zip(bounds, (bottom, top + 8), strict=True):
        yield render_text(left - 6, y, f"{value:.3g}", "end")


def render_search_page(studies: Studies) -> str:
    """Return the page of a comparison."""
    machine = describe_machine(Path.cwd())
    facts = ", ".join(f"{k} {v}" for k, v in machine.items() if isinstance(v, str | int))
    about = f"Paceline {VERSION}; {facts}"
    results = table(_RESULTS, result_rows(studies), kind="scroll facts wrap")
    spending = table(_SPENDING, spending_rows(studies), kind="scroll facts wrap")
    note = (
        f"Near: the mean over keys of the distance to the best trial before it is below {_NEAR}. Gain: how"
        " much better than that one, as a share of its loss; 0 for a trial that was not better."
    )
    body = [
        tag("header", tag("h1", "Searches"), tag("div", about, class_="sub")),
        tag("h2", "What each search found"),
        results,
        tag("h2", "How it spent its trials"),
        spending,
        tag("p", note, class_="note"),
        Html(render_search_plot(studies)),
    ]
    return render_document("Searches", body, wide=True)
