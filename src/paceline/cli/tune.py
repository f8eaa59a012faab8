"""`paceline tune`: search for the best settings of a recipe; the worker processes of its trials run it as
well.

With a rank in the environment, the argument is the folder of a trial, and the command is one rank of it.
"""

from __future__ import annotations

import json
import secrets
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import typer

from paceline.cli import common_options
from paceline.cli.console import error_output, output, print_json, print_plain
from paceline.cli.executor_choice import Engine, build_executor
from paceline.errors import RecipeError, format_count

if TYPE_CHECKING:
    from rich.console import Console

    from paceline.recipe.recipe import Recipe
    from paceline.search import ExecutorRequest, Study, StudyRequest, WorkerEntrance

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
Workers = Annotated[
    int,
    typer.Option(
        "--workers", min=0, help="Trials that run at the same time: on this machine, or where --on says."
    ),
]
On = Annotated[
    Engine | None,
    typer.Option(
        "--on", help="Start the workers as tasks of Slurm or actors of Ray, on --nodes.", show_default=False
    ),
]
EngineOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        help="Option of the engine: partition=cpu, wait=SECONDS, address=HOST:6379. Repeatable.",
    ),
]
Listen = Annotated[
    str | None,
    typer.Option(
        "--listen",
        metavar="HOST:PORT",
        help="Let workers of other machines join there; needs --token-file. Port 0: a free one.",
        show_default=False,
    ),
]
LeaseSeconds = Annotated[
    float, typer.Option("--lease", min=1.0, help="Seconds without a heartbeat after which a worker is lost.")
]
Reuse = Annotated[
    Path | None,
    typer.Option(
        "--reuse", help="Take complete runs with equal recipes from this study's folder.", show_default=False
    ),
]


Export = Annotated[
    Literal["optuna"] | None,
    typer.Option(
        "--export", help="Also write the trials to a storage for optuna-dashboard.", show_default=False
    ),
]


def tune(
    recipe: common_options.RecipeArgument,
    space: SpaceFile = None,
    trials: Trials = None,
    workers: Workers = 1,
    on: On = None,
    nodes: common_options.Nodes = 1,
    options: EngineOptions = None,
    listen: Listen = None,
    token_file: common_options.TokenFile = "",
    lease: LeaseSeconds = 20.0,
    reuse: Reuse = None,
    strategy: common_options.StrategyOption = None,
    settings: common_options.Settings = None,
    out: common_options.Out = None,
    export: Export = None,
    as_json: common_options.AsJson = False,
) -> None:
    """Search for the best settings of RECIPE; the same command continues where it stopped."""
    from paceline.job.cluster import Cluster

    cluster = Cluster.of_worker()
    if cluster is not None:
        from paceline.search.trial_rank import run_trial

        run_trial(cluster, recipe)
    from paceline.recipe.recipe_loading import RecipeFile
    from paceline.search import StudyRequest, read_study_file

    if space is None:
        raise RecipeError(
            "tune needs a space", next_step="paceline tune RECIPE --space space.toml --trials 32"
        )
    # without a time in its name, so that the same command finds it again
    folder = out or Path("studies") / f"{recipe.stem}-{space.stem}"
    console = error_output() if as_json else output()
    file, base_dir = RecipeFile(recipe), common_options.task_directory(recipe)

    def load(overrides: Sequence[str], chosen: str | None) -> Recipe:
        resolved = file.load([*(settings or []), *overrides], chosen or strategy)
        return common_options.absolute_paths(resolved, base_dir)

    request = StudyRequest(
        plan=read_study_file(space),
        load=load,
        count_processes=lambda resolved: common_options.processes_for(resolved, None, 1),
        folder=folder,
        trials=trials,
        workers=workers if on is None else 0,
        entrance=_entrance(listen or _own_address(on), token_file, lease, workers, makes_key=on is not None),
        executor=None if on is None else _executor(on, load([], None), workers, nodes, options or [], folder),
        reuse=reuse,
        report=lambda line: print_plain(line, console),
    )
    print_plain(f"study: {folder}", console)
    _run(request, console, as_json=as_json, exports=export is not None)


def _run(request: StudyRequest, console: Console, *, as_json: bool, exports: bool) -> NoReturn:
    """Run a study, show its result, and exit."""
    from paceline.search import StudyStopped, run_study

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # stops as Ctrl-C does
    try:
        study = run_study(request)
    except (KeyboardInterrupt, StudyStopped):
        print_plain("stopped; the same command continues", console)
        sys.exit(_INTERRUPTED_EXIT_CODE)
    _show(study, as_json)
    if exports:
        _export(study, console)
    sys.exit(0 if study.best is not None else 1)


def _export(study: Study, console: Console) -> None:
    """Write the trials to a storage of Optuna in the folder of the study."""
    from paceline.search.optuna_storage import export_trials

    path = export_trials(study.folder, study.plan, study.trials)
    print_plain(f"storage: {path} (optuna-dashboard {path})", console)


def _own_address(engine: str | None) -> str | None:
    """Return where the workers of an engine find this machine; None without an engine."""
    from paceline.job.addresses import address_towards, format_address, loopback_address

    if engine is None:
        return None
    # the address of the default route; nothing is sent to this one, which is reserved for documentation
    outward = "" if engine == "local" else address_towards("192.0.2.1", 9)
    return format_address(outward or loopback_address(), 0)


def _executor(
    engine: Engine, recipe: Recipe, workers: int, nodes: int, options: Sequence[str], folder: Path
) -> ExecutorRequest:
    """Return the workers that an engine starts, the same number on each node."""
    from paceline.launch.executor import NodeRequest
    from paceline.search import ExecutorRequest

    if not workers or workers % nodes:
        raise RecipeError(
            f"{format_count(workers, 'worker')} cannot be divided among {format_count(nodes, 'node')}",
            where="--workers",
            next_step=f"--workers {max(1, workers // nodes) * nodes}",
        )
    executor = build_executor(engine, options, "--option")
    per_node = workers // nodes
    processes = per_node * common_options.processes_for(recipe, None, 1)
    gpus = processes if recipe.runtime.device == "cuda" else 0
    request = NodeRequest(nodes, per_node, processes * max(1, recipe.runtime.threads), gpus)
    return ExecutorRequest(executor, request, folder / "logs" / "workers.log")


def _entrance(
    listen: str | None, token_file: str, lease: float, workers: int, *, makes_key: bool
) -> WorkerEntrance | None:
    from paceline.search import WorkerEntrance

    if listen is None:
        if not workers:
            raise RecipeError(
                "0 workers and none that could join",
                where="--workers",
                next_step="pass --listen HOST:PORT --token-file KEY, or --workers 1",
            )
        return None
    key = secrets.token_hex(32) if makes_key and not token_file else _read_key(token_file)
    return WorkerEntrance(*_split(listen, "--listen"), key, lease)


def _split(address: str, where: str) -> tuple[str, int]:
    from paceline.recipe.log_recipe import split_address

    try:
        return split_address(address)
    except ValueError:
        raise RecipeError(
            f"expected HOST:PORT, found '{address}'", where=where, next_step="for example 10.0.0.1:29700"
        ) from None


def _read_key(token_file: str) -> str:
    token = common_options.read_token(token_file, insecure=False, nodes=1)
    if not token:
        raise RecipeError(
            "workers of other machines need a key: without it, anyone could join",
            next_step="pass the same file on each machine: --token-file KEY; or set PACELINE_TOKEN",
        )
    return token


Address = Annotated[str, typer.Argument(metavar="HOST:PORT", help="Where the coordinator listens.")]
StudyFolder = Annotated[
    Path | None,
    typer.Option(
        "--out",
        help="Folder of the study as this machine sees it. Default: as the coordinator does.",
        show_default=False,
    ),
]
Patience = Annotated[
    float, typer.Option("--wait", min=0.0, help="Seconds for which the coordinator may be gone.")
]


def work(
    address: Address,
    token_file: common_options.TokenFile = "",
    out: StudyFolder = None,
    wait: Patience = 60.0,
) -> None:
    """Run trials of a study that another machine coordinates, until it ends."""
    from paceline.job.rendezvous import StoreAccess
    from paceline.search import serve_leases

    host, port = _split(address, "HOST:PORT")
    access = StoreAccess(1, host, port, _read_key(token_file), tls=True)
    serve_leases(access, out, wait, lambda line: print_plain(line, output()))
    print_plain("the study needs this worker no more")


Seeds = Annotated[int, typer.Option("--seeds", min=1, help="Seeds of each search, from 1.")]
StudyTrials = Annotated[int, typer.Option("--trials", min=2, help="Trials of each search.")]
Tasks = Annotated[
    list[str] | None,
    typer.Option("--task", help="Only this task: digits or text. Repeatable.", show_default=False),
]


def study_hpo(
    seeds: Seeds = 5,
    trials: StudyTrials = 20,
    workers: Annotated[int, typer.Option("--workers", min=1, help="Trials at the same time.")] = 2,
    tasks: Tasks = None,
    out: common_options.Out = None,
    as_json: common_options.AsJson = False,
) -> None:
    """Compare grid, random and TPE searches on digits and on text; write tables, a plot and a page."""
    from paceline.search import StudyStopped, search_comparison

    unknown = sorted(set(tasks or ()) - set(search_comparison.TASKS))
    if unknown:
        raise RecipeError(f"unknown task '{unknown[0]}'", where="--task", next_step="digits or text")
    folder = out or Path("studies") / "hpo"
    console = error_output() if as_json else output()
    request = search_comparison.ComparisonRequest(
        folder,
        tasks or list(search_comparison.TASKS),
        search_comparison.SEARCHES,
        seeds,
        trials,
        workers,
        lambda resolved: common_options.processes_for(resolved, None, 1),
        lambda line: print_plain(line, console),
    )
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        studies = search_comparison.run_comparison(request)
    except (KeyboardInterrupt, StudyStopped):
        print_plain("stopped; the same command continues", console)
        sys.exit(_INTERRUPTED_EXIT_CODE)
    lines, values = search_comparison.render_lines(studies), search_comparison.summarize_comparison(studies)
    files = {
        "results.json": json.dumps(values, indent=1) + "\n",
        "table.txt": "\n".join(lines) + "\n",
        "plot.svg": search_comparison.render_search_plot(studies),
        STUDY_PAGE: search_comparison.render_search_page(studies),
    }
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    if as_json:
        print_json(values)
    for line in (*lines, f"page: {folder / STUDY_PAGE}"):
        print_plain(line, console)


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
