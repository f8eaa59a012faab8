"""The job that `paceline submit` starts: its arguments, and what it requests on each node."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from paceline.cli import common_options
from paceline.cli.console import error_output, print_plain
from paceline.errors import PacelineError, RecipeError, StrategyError, TaskError, format_count

if TYPE_CHECKING:
    from paceline.launch.job_target import JobTarget, NodeResources
    from paceline.recipe.recipe import Recipe

SUBMISSIONS, SWEEPS = Path("submissions"), Path("sweeps")


@dataclass(frozen=True)
class SubmitArgs:
    """The arguments of `paceline submit`, as the user gave them."""

    recipe: Path
    engine: str
    nodes: int
    processes: int | None
    strategy: str | None
    settings: tuple[str, ...]
    name: str
    options: tuple[tuple[str, str], ...]
    hosts: tuple[str, ...]
    prices: Path | None = None
    over: tuple[str, ...] = ()
    render: Path | None = None

    @property
    def folder(self) -> Path:
        """The folder of the files; for a job array that of the sweep, with its runs."""
        return self.render or (SWEEPS if self.over else SUBMISSIONS) / self.name


def show_request(
    args: SubmitArgs, need: NodeResources, target: JobTarget, show: Callable[[str], object]
) -> None:
    """Print what a job requests, and what that costs if there is a price file."""
    from paceline.launch.cloud_task import describe_cost, read_machines

    memory = f", {need.memory_mib:,} MiB" if need.memory_mib else ""
    gpus = f", {format_count(need.gpus, 'GPU')}" if need.gpus else ""
    show(f"each of {format_count(args.nodes, 'node')}: {format_count(need.cpus, 'core')}{memory}{gpus}")
    if args.prices is not None:
        machines = read_machines(read_price_file(args.prices), str(args.prices))
        show(describe_cost(machines, need, target))


def read_price_file(path: Path) -> str:
    """Return the text of a price file."""
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(
            f"cannot read the price file {path}: {error}", next_step="name a TOML file: docs/howto/cloud.md"
        ) from error


def planned_bytes(args: SubmitArgs, recipe: Recipe, count: int, show: Callable[[str], object]) -> int:
    """Return the planned peak of a rank; 0 if nothing is requested by it, or it cannot be planned."""
    if args.engine in ("mpi", "ssh") or any(name.startswith("mem") for name, _ in args.options):
        return 0
    from paceline.plan.memory_budget import check_budget
    from paceline.session.start_rank import build_task

    try:
        with _ErrorsOfTask() as raised:
            task = build_task(recipe, None, common_options.task_directory(args.recipe))
            try:
                verdict = check_budget(recipe, task, count * args.nodes, nodes=args.nodes)
            except StrategyError:  # of some routes between hosts only the tensors of the ranks can be planned
                verdict = check_budget(recipe, task, count * args.nodes)
    except (StrategyError, TaskError) as error:
        show(f"memory is not requested: {error.what}")
        return 0
    if raised.text:
        print_plain(f"warning: memory is not requested: {raised.text}", error_output())
        return 0
    if verdict.refusal is not None:
        raise verdict.refusal
    return verdict.plan.peak


class _ErrorsOfTask:
    """A context manager that keeps what the user's own code raises; errors of Paceline pass.

    Attributes:
        text: the exception with its file and line, and what to do; empty: there was none.
    """

    def __init__(self) -> None:
        self.text = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        from paceline.launch.worker_guard import is_folded

        if not isinstance(error, Exception) or isinstance(error, PacelineError):
            return False
        frames = [frame for frame in traceback.extract_tb(trace) if not is_folded(frame.filename)]
        where = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
        summary = str(error).partition("\n")[0]
        self.text = (
            f"the task raised {type(error).__name__}: {summary}{where}. Correct it, unless it needs what only"
            " the nodes of the job have"
        )
        return True
