"""`paceline submit`: render the files of a job for another engine, and call the engine's own client."""

from __future__ import annotations

import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from paceline.cli import common_options
from paceline.cli.console import print_plain
from paceline.cli.executor_choice import signals_to
from paceline.cli.job_request import SubmitArgs, planned_bytes, show_request
from paceline.errors import PacelineError, RecipeError

_POLL_SECONDS = 1.0
_SSH_FAILED = 255
_OF_CANCEL = ("kind", "namespace")
_SERVER_KINDS = "deployment,horizontalpodautoscaler"
_CLIENTS = {"slurm": "sbatch", "mpi": "mpirun", "ssh": "ssh", "kubernetes": "kubectl", "sky": "sky"}


Axes = Annotated[
    list[str] | None,
    typer.Option(
        "--over", help="Slurm: an axis of a sweep, as a job array: batch=32,64 or seed=1,2. Repeatable."
    ),
]
Prices = Annotated[
    Path | None, typer.Option("--prices", help="Price file (TOML) for the hourly cost that --dry-run prints.")
]
Attach = Annotated[
    bool, typer.Option("--attach", help="Print the output of the job until it ends; its exit code is ours.")
]


def submit(
    recipe: Annotated[
        Path | None, typer.Argument(help="The recipe, a TOML file.", show_default=False)
    ] = None,
    on: Annotated[str, typer.Option("--on", help="slurm, mpi, ssh, ray, kubernetes or sky.")] = "slurm",
    nodes: common_options.Nodes = 1,
    processes: common_options.Processes = None,
    strategy: common_options.StrategyOption = None,
    settings: common_options.Settings = None,
    name: Annotated[
        str | None,
        typer.Option("--name", help="Name of the job; its run is runs/NAME. Default: recipe, time."),
    ] = None,
    options: Annotated[
        list[str] | None,
        typer.Option("--option", help="Option of the engine: partition=gpu, image=NAME:TAG. Repeatable."),
    ] = None,
    over: Axes = None,
    hosts: Annotated[str, typer.Option("--hosts", help="Hosts of mpi and ssh, with commas.")] = "",
    render: Annotated[
        Path | None, typer.Option("--render", help="Write the files to this folder, and submit nothing.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the files, the resources and the command; write nothing.")
    ] = False,
    prices: Prices = None,
    attach: Attach = False,
    cancel: Annotated[str | None, typer.Option("--cancel", metavar="JOB", help="Cancel a job.")] = None,
) -> None:
    """Start RECIPE by Slurm, MPI, ssh, Ray, Kubernetes or SkyPilot."""
    if cancel is not None:
        _cancel(on, cancel, dict(_parse_option(text) for text in options or ()))
        return
    if recipe is None:
        raise RecipeError("submit needs a recipe, or --cancel JOB", next_step="paceline submit RECIPE")
    args = SubmitArgs(
        recipe=recipe,
        engine=on,
        nodes=nodes,
        processes=processes,
        strategy=strategy,
        settings=tuple(settings or ()),
        name=name or f"{recipe.stem}-{datetime.now():%Y%m%d-%H%M%S}",
        options=tuple(map(_parse_option, options or ())),
        hosts=tuple(host for host in hosts.split(",") if host),
        prices=prices,
        over=tuple(over or ()),
        render=render,
    )
    if attach and over:
        raise RecipeError(
            "--attach prints the output of one job, and --over makes several",
            next_step="leave it out; the output of task I of job J is in NAME-J_I.out",
        )
    files = render_files(args, show=print_plain if dry_run else lambda text: None)
    if dry_run:
        _show_files(args, files)
    else:
        _write(files, args.folder)
        if render is None:
            sys.exit(_submit(args, args.folder / next(iter(files)), attach=attach))


def _parse_option(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    return name.lstrip("-"), value


def render_files(args: SubmitArgs, show: Callable[[str], object]) -> dict[str, str]:
    """Return the files of a job by name.

    Args:
        show: prints what the job requests.
    Raises:
        RecipeError, StrategyError: the recipe, the name or an option is wrong, or a file would have a secret.
    """
    from paceline.cli.job_array import render_sweep
    from paceline.job.cluster import process_environment
    from paceline.launch.rendered_job import find_secrets

    if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,40}[a-z0-9])?", args.name):
        raise RecipeError(
            f"--name '{args.name}' cannot name a job on every engine",
            next_step="--name with at most 42 lower-case letters, digits and dashes",
        )
    files = render_sweep(args, show) if args.over else _render_job(args, show)
    leaked = find_secrets(files, process_environment())
    if leaked:
        raise RecipeError(
            f"the value of {', '.join(leaked)} stands in a rendered file",
            next_step="leave it out of the recipe",
        )
    return files


def _render_job(args: SubmitArgs, show: Callable[[str], object]) -> dict[str, str]:
    from paceline.launch.job_target import JobTarget, plan_resources
    from paceline.launch.rendered_job import render as render_job
    from paceline.recipe.recipe_loading import load_recipe

    in_pod = args.engine in ("kubernetes", "sky")
    settings = list(args.settings)
    checked = common_options.read_recipe(args.recipe, settings, args.strategy)
    recipe = load_recipe(args.recipe, settings, args.strategy) if in_pod else checked
    count = common_options.processes_for(checked, args.processes, args.nodes)
    target = JobTarget(
        engine=args.engine,
        name=args.name,
        nodes=args.nodes,
        processes=count,
        command=("paceline",) if in_pod else (sys.executable, "-m", "paceline"),
        recipe_path=str(_path_of(args)),
        run_dir=args.name if in_pod else str(Path("runs", args.name).resolve()),
        arguments=tuple(word for setting in settings for word in ("--set", setting)),
        options=args.options,
        hosts=args.hosts,
        planned_bytes=planned_bytes(args, checked, count, show),
    )
    show_request(args, plan_resources(recipe, target), target, show)
    return render_job(recipe, recipe.strategy, target)


def _path_of(args: SubmitArgs) -> Path:
    """Return the recipe as nodes find it: those of a cloud get a copy of this folder.

    Raises:
        RecipeError: the recipe is not in it.
    """
    path = args.recipe.resolve()
    if args.engine != "sky":
        return path
    folder = Path(dict(args.options).get("workdir", ".")).resolve()
    if not path.is_relative_to(folder):
        raise RecipeError(
            f"{path} is not in {folder}, which is what SkyPilot copies to the machines",
            next_step="run this command in a folder above the recipe, or --option workdir=FOLDER",
        )
    return path.relative_to(folder)


def _show_files(args: SubmitArgs, files: dict[str, str]) -> None:
    for file, text in files.items():
        print_plain(f"== {file}\n{text}")
    print_plain(f"command: {' '.join(_submit_command(args.engine, args.folder / next(iter(files))))}")


def _write(files: dict[str, str], folder: Path) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
        print_plain(f"wrote {folder / name}")


# The clients of the engines


def _submit_command(engine: str, file: Path) -> list[str]:
    words = {"slurm": ["sbatch"], "kubernetes": ["kubectl", "apply", "-f"], "ray": [sys.executable]}
    # a managed job, which starts again where spot machines were taken away
    words |= {"sky": ["sky", "jobs", "launch", "--yes", "--detach-run", "--secret", "PACELINE_TOKEN"]}
    return [*words.get(engine, ["bash"]), str(file)]


def _submit(args: SubmitArgs, file: Path, *, attach: bool) -> int:
    """Call the engine's client; returns the exit code."""
    from paceline.launch.engine_clients import call_client, require_client

    if args.engine != "ray":
        require_client(_CLIENTS[args.engine])
    if args.engine in ("mpi", "ssh", "ray"):  # these run here, and their output is that of this command
        code = _run_here(_submit_command(args.engine, file))
        if args.engine == "ssh" and code == _SSH_FAILED:
            raise PacelineError(
                f"ssh has not reached all of {', '.join(args.hosts[: args.nodes])}: see its message above",
                next_step="`ssh HOST true` has to work without a password: ssh-copy-id HOST",
            )
        return code
    if args.engine == "kubernetes":
        return _submit_to_kubernetes(args, file, attach=attach)
    if args.engine == "sky":
        return _run_here(_submit_command("sky", file), PACELINE_TOKEN=secrets.token_hex(32))
    printed = call_client(["sbatch", "--parsable", str(file)])
    job = printed.strip().partition(";")[0]
    print_plain(f"job {job}: cancel it by `paceline submit --on slurm --cancel {job}`")
    if args.over:
        from paceline.cli.job_array import collect_command

        print_plain(f"results of the runs that are complete: {collect_command(args)}")
    return _follow_slurm(job) if attach else 0


def _run_here(words: Sequence[str], **more: str) -> int:
    """Run a command in the foreground; SIGTERM is passed on, and Ctrl-C reaches it from the terminal.

    Args:
        more: variables besides those of this process.
    """
    from paceline.job.cluster import process_environment

    process = subprocess.Popen(words, env={**process_environment(), **more})

    def forward(number: int) -> None:
        if number == signal.SIGTERM:
            process.send_signal(number)

    with signals_to(forward):
        return process.wait()


def run_on_ray(
    *,
    address: str,
    wait_seconds: float,
    max_restarts: int,
    nodes: int,
    processes: int,
    cpus: int,
    gpus: int,
    memory_mib: int,
    servers: int,
    checkpoints: str,
    patience_seconds: float,
    words: Sequence[str],
) -> NoReturn:
    """Run a job on a cluster of Ray to its end, and exit with its exit code; a rendered file calls this.

    Args:
        address, wait_seconds: of the cluster; how long to wait for free nodes.
        nodes, processes, cpus, gpus, memory_mib: see `NodeRequest`.
        servers: number of servers among the ranks, which come first.
        checkpoints: folder of the run's checkpoints.
        max_restarts, patience_seconds, words: see `ExecutorJob`.
    """
    from paceline.cli.restarts import find_newest_checkpoint
    from paceline.launch.executor import ExecutorJob, NodeRequest, run_job
    from paceline.launch.ray_executor import RayExecutor

    def write(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    request = NodeRequest(nodes, processes, cpus, gpus, memory_mib)
    roles = ("server",) * servers + ("worker",) * (nodes * processes - servers)
    job = ExecutorJob(request, tuple(words), roles, max_restarts, patience_seconds)
    requests: list[int] = []
    try:
        executor = RayExecutor(address, wait_seconds)
        try:
            with signals_to(requests.append):
                code = run_job(
                    executor,
                    job,
                    lambda: find_newest_checkpoint(checkpoints)[0],
                    write,
                    lambda: bool(requests),
                )
        finally:
            executor.leave()
    except PacelineError as error:
        sys.stderr.write(f"{error}\n")
        code = error.exit_code
    sys.exit(code)


def _submit_to_kubernetes(args: SubmitArgs, file: Path, *, attach: bool) -> int:
    from paceline.launch.engine_clients import call_client, explain_client_error

    namespace = [word for name, value in args.options if name == "namespace" for word in ("-n", value)]
    key = ["create", "secret", "generic", f"{args.name}-key", "--from-file=token=/dev/stdin"]
    call_client(["kubectl", *namespace, *key], text=secrets.token_hex(32))
    print_plain(call_client(["kubectl", *namespace, "apply", "-f", str(file)]).rstrip())
    same = "".join(f" --option {name}={value}" for name, value in args.options if name in _OF_CANCEL)
    print_plain(f"cancel it by `paceline submit --on kubernetes --cancel {args.name}{same}`")
    if not attach:
        return 0
    logs = ["logs", "--follow", "--pod-running-timeout=5m", "-l", f"app.kubernetes.io/instance={args.name}"]
    done = subprocess.run(["kubectl", *namespace, *logs], stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise explain_client_error("kubectl", done.stderr)
    return 0


def _cancel(engine: str, job: str, options: dict[str, str]) -> None:
    """Cancel a job by the engine's client."""
    from paceline.launch.engine_clients import call_client, require_client

    namespace = ["-n", options["namespace"]] if "namespace" in options else []
    kinds = {"jobset": "jobset", "trainjob": "trainjob,trainingruntime", "serve": _SERVER_KINDS}
    # kubectl refuses a list with a kind that the cluster does not know
    of_job = f"{kinds.get(options.get('kind', ''), 'job')},service,configmap"
    commands = {
        "slurm": [["scancel", job]],
        "sky": [["sky", "jobs", "cancel", "--yes", "--name", job]],
        "kubernetes": [
            ["kubectl", "delete", of_job, "-l", f"app.kubernetes.io/instance={job}", *namespace],
            ["kubectl", "delete", "secret", f"{job}-key", "--ignore-not-found", *namespace],
        ],
    }
    if engine not in commands:
        raise RecipeError(
            f"a job of {engine} runs in the foreground of the command that started it",
            next_step="stop it there by Ctrl-C; it saves and exits",
        )
    require_client(commands[engine][0][0])
    for words in commands[engine]:
        print_plain(call_client(words).rstrip() or f"cancelled {job}")


_REASONS = {
    "Resources": "the partition is full; the job starts when enough nodes are free",
    "Priority": "jobs with a higher priority come first",
    "PartitionNodeLimit": "it has fewer nodes than --nodes: name another by --option partition=NAME",
    "PartitionTimeLimit": "the partition allows less time: --option time=HH:MM:SS",
    "ReqNodeNotAvail": "a node that it needs is down or reserved: `sinfo -R`",
    "BeginTime": "it was queued again, and starts soon",
    "JobHeldUser": "it is held: scontrol release JOB",
}
_ENDED = (
    "COMPLETED",
    "FAILED",
    "CANCELLED",
    "TIMEOUT",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "BOOT_FAIL",
    "DEADLINE",
)


def describe_reason(reason: str) -> str:
    """Return why a job waits, given the reason of Slurm."""
    return _REASONS.get(reason, "see `squeue` for its place")


def _follow_slurm(job: str) -> int:
    """Print the output of a job until it ends, and why it waits; returns its exit code."""
    from paceline.launch.engine_clients import call_client

    offset, told = 0, ""
    while True:
        shown = call_client(["scontrol", "show", "job", "-o", job])
        fields = dict(re.findall(r"(\w+)=(\S*)", shown))
        state, reason = fields.get("JobState", ""), fields.get("Reason", "")
        if state == "PENDING" and reason not in ("None", told):
            told = reason
            print_plain(f"job {job} waits ({reason}): {describe_reason(reason)}")
        offset = _show_more(Path(fields.get("StdOut", "")), offset)
        if state in _ENDED:
            code, _, number = fields.get("ExitCode", "0:0").partition(":")
            print_plain(f"job {job}: {state.lower()}")
            return int(code) or (128 + int(number) if int(number) else int(state != "COMPLETED"))
        time.sleep(_POLL_SECONDS)


def _show_more(file: Path, offset: int) -> int:
    """Print what a file has beyond an offset; returns its new end."""
    if not file.is_file():
        return offset
    with file.open("rb") as stream:
        stream.seek(offset)
        text = stream.read()
    sys.stdout.write(text.decode(errors="replace"))
    sys.stdout.flush()
    return offset + len(text)
