"""`paceline train`: start the processes of a training job, or be one of them.

Without a rank in the environment the command checks the arguments, claims the run folder and launches itself
once for each process; with one it trains as that rank. The launcher writes failures to the run folder, since
the workers can be gone by then. What it runs is imported inside functions, so that the help stays light.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import common_options
from paceline.cli.common_options import NodeArgs
from paceline.cli.console import job_output, print_plain
from paceline.cli.doctor import warn_of_host
from paceline.errors import RecipeError, RunFolderError, format_count

if TYPE_CHECKING:
    from paceline.job.cluster import Cluster
    from paceline.launch.outcome import LaunchOutcome
    from paceline.recipe.recipe import Recipe


def train(
    recipe: Annotated[
        Path | None, typer.Argument(help="The recipe, a TOML file.", show_default=False)
    ] = None,
    processes: common_options.ProcessBounds = None,
    strategy: common_options.StrategyOption = None,
    settings: common_options.Settings = None,
    resume: Annotated[
        str | None,
        typer.Option(
            "--resume",
            metavar="[RUN]",
            help="Resume a run folder or a checkpoint inside one. Without RUN: the newest run in runs/.",
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option("--name", help="Name of the new folder runs/TIME-NAME. Default: the recipe's name."),
    ] = None,
    auto_resume: Annotated[
        bool,
        typer.Option(
            "--auto-resume",
            help="Continue the run in run_dir if there is one, else start it; for jobs that are restarted.",
        ),
    ] = False,
    nodes: common_options.Nodes = 1,
    node_rank: common_options.NodeRank = 0,
    rendezvous: common_options.Rendezvous = None,
    token_file: common_options.TokenFile = "",
    insecure: common_options.Insecure = False,
    trust: common_options.Trust = False,
    logs: Annotated[
        Path | None,
        typer.Option("--logs", help="Write the output of every rank but the first to this folder."),
    ] = None,
) -> None:
    """Train a recipe and print the result."""
    least, _, most = (processes or "").rpartition(":")
    bounds = [f"elastic.min_processes={least}"] if least else []
    run_train(
        TrainArgs(
            recipe=recipe,
            strategy=strategy,
            settings=[*(settings or ()), *bounds],
            resume=resume,
            auto_resume=auto_resume,
            name=name,
            nodes=NodeArgs(int(most) if most else None, nodes, node_rank, rendezvous, token_file, insecure),
            trust=trust,
            logs=logs,
        )
    )


@dataclass(frozen=True)
class TrainArgs:
    """The arguments of `paceline train`, as the user gave them."""

    recipe: Path | None
    strategy: str | None
    settings: list[str] | None
    resume: str | None
    auto_resume: bool
    name: str | None
    nodes: NodeArgs
    trust: bool
    logs: Path | None


def run_train(args: TrainArgs) -> None:
    """Train as one rank, or launch the processes of this node; exits with the exit code of the job."""
    from paceline.cli.resume import find_recipe, find_run, require_own_run

    run = None if args.resume is None else find_run(args.resume)
    path = args.recipe if args.recipe is not None or run is None else find_recipe(run)
    if path is None:
        raise RecipeError(
            "train needs a recipe, or --resume with a run folder",
            next_step="paceline train recipes/digits.toml",
        )
    _require_shared(path)
    recipe = common_options.read_recipe(path, args.settings, args.strategy)
    run_name = args.name or path.stem
    cluster = args.nodes.worker(recipe.security.tls)
    has_launcher = cluster is not None and cluster.error_dir is not None
    if args.auto_resume and args.resume is None:
        run = _run_to_continue(recipe)
    # A worker skips the checks below, which its launcher has made.
    if cluster is not None and has_launcher:
        _train_rank(cluster, recipe, path, run, run_name)
    if run is not None:
        require_own_run(run, args.trust)
    if cluster is not None:
        _check_engine(cluster, recipe, args)
        _train_rank(cluster, recipe, path, run, run_name)
    _check_name(args.name, recipe, run)
    node_args = args.nodes.on_engine()
    processes = _num_processes(run, node_args.processes, args.strategy, node_args.nodes)
    count = common_options.processes_for(recipe, processes, node_args.nodes)
    placement = node_args.placement(count, recipe.security.tls)
    if recipe.federated.is_networked and not placement.token:
        raise RecipeError(
            "clients of a network need a key: without it, anyone who reaches the server could join",
            where='federated.clients = "network"',
            next_step="pass the same --token-file or PACELINE_TOKEN to the job and to every client",
        )
    warn_of_host(recipe, placement.processes, placement.nodes)
    sys.exit(_launch(placement, recipe, run, run_name, args.logs))


def _require_shared(path: Path) -> None:
    """Refuse a recipe that only other nodes of an engine's job have."""
    from paceline.job.cluster import current_place

    place = None if path.is_file() else current_place()
    if place is not None and place.num_nodes > 1:
        raise RecipeError(
            f"node {place.node_rank} of {place.num_nodes} has no file {path}",
            where=f"the variables of {place.engine}: {place.settings}",
            next_step="put the recipe and its run folder into a folder that all nodes share",
        )


def _run_to_continue(recipe: Recipe) -> Path | None:
    """Return the run folder of the recipe if it holds a run; None: the run has not begun.

    Nodes may look at different moments while rank 0 creates the folder. Ranks only differ by it if there is a
    checkpoint, which there cannot be before all ranks have joined.

    Raises:
        RecipeError: the recipe names no folder.
    """
    from paceline.report.run_files import is_run_folder

    if recipe.run_dir is None:
        raise RecipeError(
            "--auto-resume needs the folder of the run, the same at every start",
            next_step="--set run_dir=runs/NAME",
        )
    return Path(recipe.run_dir) if is_run_folder(Path(recipe.run_dir)) else None


def _check_engine(cluster: Cluster, recipe: Recipe, args: TrainArgs) -> None:
    """Refuse what does not fit the ranks that an engine has started.

    Raises:
        StrategyError: the strategy does not fit their number, or has another number of servers.
    """
    from paceline.job.cluster import current_place

    common_options.processes_for(recipe, cluster.world_size, 1)
    if args.logs is not None:
        raise RecipeError(
            "--logs has no effect here: the engine that starts the processes writes their output",
            next_step="leave it out; srun has --output, mpirun has --output-filename",
        )
    place, servers = current_place(), recipe.strategy.servers
    if place is not None and place.num_servers not in (None, servers):
        raise RecipeError(
            f"the cluster has {format_count(place.num_servers or 0, 'server')}, and the strategy"
            f" '{recipe.strategy}' has {servers}",
            where=f"the variables of {place.engine}: {place.settings}",
            next_step=f"use servers={place.num_servers}, or another table of tasks",
        )


def _num_processes(run: Path | None, processes: int | None, strategy: str | None, nodes: int) -> int | None:
    """Return the number of processes on each node: as asked for, else as many as the resumed run had."""
    from paceline.report.run_files import resolve_run_folder
    from paceline.report.run_reader import read_run

    ranks = 0 if run is None else read_run(resolve_run_folder(run)).ranks
    if processes is None:
        return ranks // nodes if ranks and not strategy and not ranks % nodes else None
    if ranks and processes * nodes != ranks:
        print_plain(f"the run continues on {format_count(processes * nodes, 'process')} (before: {ranks})")
    return processes


def _check_name(name: str | None, recipe: Recipe, run: Path | None) -> None:
    """Refuse a `--name` that is no valid folder name, or is given together with `run_dir` or `--resume`."""
    if name is None:
        return
    other = f"run_dir = {recipe.run_dir}" if recipe.run_dir is not None else f"--resume {run}" if run else ""
    if other:
        raise RecipeError(
            f"--name {name} and {other} both set the run folder", next_step="leave one of them out"
        )
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise RecipeError(
            f"--name '{name}' is not a valid folder name", next_step="use letters, digits, dots, _ and -"
        )


def _launch(
    placement: common_options.JobPlacement,
    recipe: Recipe,
    run: Path | None,
    run_name: str,
    logs: Path | None = None,
) -> int:
    """Start the workers on the run's folder and record failures there; returns the exit code."""
    from paceline.cli.resume import recipe_changes
    from paceline.recipe.toml_text import toml_value
    from paceline.report.run_files import resolve_run_folder

    for line in [] if run is None else recipe_changes(run, recipe):
        print_plain(line)
    # the workers run the same command line; these options make all of them use the folder claimed here
    if run is None:
        run_dir = _claim_folder(recipe, placement, run_name)
        worker_options = ["--set", f"run_dir={toml_value(str(run_dir))}"]
    else:
        run_dir = resolve_run_folder(run)
        worker_options = ["--resume", str(run)]
    try:
        outcome = _run_with_restarts(placement, recipe, run_dir, worker_options, logs)
    finally:
        if run is None and recipe.run_dir is None:
            with suppress(OSError):  # removes the folder only if it is empty: the run never began
                run_dir.rmdir()
    return outcome.exit_code


def _run_with_restarts(
    placement: common_options.JobPlacement,
    recipe: Recipe,
    run_dir: Path,
    worker_options: Sequence[str],
    logs: Path | None,
) -> LaunchOutcome:
    """Run the workers; start them again from the newest checkpoint after the loss of a process."""
    from paceline.cli.restarts import RestartPolicy

    policy = RestartPolicy(recipe, run_dir, placement.nodes, is_resumed="--resume" in worker_options)
    while True:
        outcome = _run_workers(placement, recipe, worker_options, logs)
        if outcome.failures and placement.node_rank == 0:
            record_failure(run_dir, outcome)
        checkpoint = policy.next_checkpoint(outcome)
        if checkpoint is None:
            return outcome
        print_plain(f"restart {policy.num_restarts} of {recipe.elastic.max_restarts} from {checkpoint}")
        worker_options = ["--resume", str(run_dir)]


def _claim_folder(recipe: Recipe, placement: common_options.JobPlacement, run_name: str) -> Path:
    """Return the folder of a new run, which no other run uses; the first node creates it."""
    from paceline.report.run_files import RUNS, claim_run_dir, refuse_existing_run

    if recipe.run_dir is not None:
        if placement.node_rank == 0:
            refuse_existing_run(Path(recipe.run_dir))
        return Path(recipe.run_dir)
    return claim_run_dir(run_name) if placement.node_rank == 0 else RUNS / run_name


def _run_workers(
    placement: common_options.JobPlacement, recipe: Recipe, worker_options: Sequence[str], logs: Path | None
) -> LaunchOutcome:
    from paceline.cli.relaunch import relaunch
    from paceline.recipe.recovery import recovery_of

    return relaunch(
        placement,
        recipe.runtime.threads,
        *worker_options,
        stuck_seconds=recipe.runtime.deadline_seconds,
        grace_seconds=recipe.checkpoint.grace_seconds,
        log_dir=logs,
        prefixed=True,
        servers=recipe.strategy.servers,
        max_replacements=recipe.elastic.max_restarts if recovery_of(recipe).kind == "in process" else 0,
    )


def record_failure(run_dir: Path, outcome: LaunchOutcome) -> None:
    """Write every failure, the cause first, to the metrics, the log and the page of the run.

    Nothing is written if the run had no folder yet. If the folder cannot be written, only a warning is
    printed: the failure has been reported on the terminal already.
    """
    from paceline.report.run_files import is_run_folder

    if not is_run_folder(run_dir):
        return
    try:
        _write_failure(run_dir, outcome)
    except (OSError, RunFolderError) as error:
        print_plain(f"cannot record the failure in {run_dir}: {error}")


def _write_failure(run_dir: Path, outcome: LaunchOutcome) -> None:
    from paceline.observe.sinks import LOG, METRICS, JsonLinesSink, TextLogSink
    from paceline.report.html_page import write_report

    def warn(text: str) -> None:
        print_plain(f"cannot record the failure in {run_dir}: {text}")

    metrics, log = JsonLinesSink(run_dir / METRICS, warn=warn), TextLogSink(run_dir / LOG, warn=warn)
    for failure in outcome.failures:
        text = f"rank {failure.global_rank} {failure.headline}"
        record = {"text": text, "kind": failure.kind, "exit_code": failure.exit_code}
        metrics.event("error", {"rank": failure.global_rank, **record})
    log.write("error", outcome.report)
    metrics.close()
    log.close()
    write_report(run_dir)


def _train_rank(cluster: Cluster, recipe: Recipe, path: Path, resume: Path | None, run_name: str) -> None:
    """Train as one rank and exit."""
    from paceline.job.launcher_reports import LEAVING
    from paceline.launch.outcome import STOPPED_EXIT_CODE
    from paceline.launch.worker_guard import guard

    with guard(cluster):
        from paceline.session.train_rank import train as train_here

        base, console = common_options.task_directory(path), job_output()
        result = train_here(recipe, base_dir=base, resume=resume, console=console, name=run_name)
        cluster.enter_phase(LEAVING, recipe.runtime.setup_deadline_seconds)
    # By this code the launcher knows that the others need time to save as well.
    sys.exit(STOPPED_EXIT_CODE if result.stopped else 0)
