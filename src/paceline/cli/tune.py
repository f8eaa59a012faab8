"""`paceline tune`: search for the best settings of a recipe; the worker processes of its trials run it as
well.

With a rank in the environment, the argument is the folder of a trial, and the command is one rank of it.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import common_options
from paceline.cli.console import error_output, output, print_json, print_plain
from paceline.errors import RecipeError

if TYPE_CHECKING:
    from paceline.recipe.recipe import Recipe
    from paceline.search import Study

_INTERRUPTED_EXIT_CODE = 130
STUDY_PAGE = "study.html"

SpaceFile = Annotated[
    Path | None,
    typer.Option("--space", help="TOML file with [study], [stop] and [space].", show_default=False),
]
Trials = Annotated[
    int | None,
    typer.Option(
        "--trials", min=1, help="Number of trials. Default: the size of a grid.", show_default=False
    ),
]
Workers = Annotated[int, typer.Option("--workers", min=1, help="Trials that run at the same time.")]
Reuse = Annotated[
    Path | None,
    typer.Option(
        "--reuse", help="Take complete runs with equal recipes from this study's folder.", show_default=False
    ),
]


def tune(
    recipe: common_options.RecipeArgument,
    space: SpaceFile = None,
    trials: Trials = None,
    workers: Workers = 1,
    reuse: Reuse = None,
    strategy: common_options.StrategyOption = None,
    settings: common_options.Settings = None,
    out: common_options.Out = None,
    as_json: common_options.AsJson = False,
) -> None:
    """Search for the best settings of RECIPE; the same command continues where it stopped."""
    from paceline.job.cluster import Cluster

    cluster = Cluster.of_worker()
    if cluster is not None:
        from paceline.search.trial_rank import run_trial

        run_trial(cluster, recipe)
    from paceline.search import StudyRequest, StudyStopped, read_study_file, run_study

    if space is None:
        raise RecipeError(
            "tune needs a space", next_step="paceline tune RECIPE --space space.toml --trials 32"
        )
    # without a time in its name, so that the same command finds it again
    folder = out or Path("studies") / f"{recipe.stem}-{space.stem}"
    console = error_output() if as_json else output()

    def load(overrides: Sequence[str], chosen: str | None) -> Recipe:
        return common_options.read_recipe(recipe, [*(settings or []), *overrides], chosen or strategy)

    request = StudyRequest(
        plan=read_study_file(space),
        load=load,
        count_processes=lambda resolved: common_options.processes_for(resolved, None, 1),
        folder=folder,
        trials=trials,
        workers=workers,
        reuse=reuse,
        report=lambda line: print_plain(line, console),
    )
    print_plain(f"study: {folder}", console)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # stops as Ctrl-C does
    try:
        study = run_study(request)
    except (KeyboardInterrupt, StudyStopped):
        print_plain("stopped; the same command continues", console)
        sys.exit(_INTERRUPTED_EXIT_CODE)
    _show(study, as_json)
    sys.exit(0 if study.best is not None else 1)


def _show(study: Study, as_json: bool) -> None:
    """Write results.json, table.txt and the page to the study's folder, and print the report."""
    from paceline.search.study_report import render_study, render_study_page, summarize_study

    summary = summarize_study(study)
    lines, values = render_study(summary), summary.to_json()
    files = {
        "results.json": json.dumps(values, indent=1) + "\n",
        "table.txt": "\n".join(lines) + "\n",
        STUDY_PAGE: render_study_page(summary),
    }
    for name, text in files.items():
        (study.folder / name).write_text(text, encoding="utf-8")
    if as_json:
        print_json(values)
    console = error_output() if as_json else output()
    for line in (
        *lines,
        f"results: {study.folder / 'results.json'}",
        f"page:    {study.folder / STUDY_PAGE}",
    ):
        print_plain(line, console)
