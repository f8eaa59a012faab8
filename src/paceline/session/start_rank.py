"""Start a rank: choose the device, connect, build the task on all ranks, build the session.

Invariant: a rank that fails leaves its connections open, since the other ranks may be gone and closing
would wait for them. If all ranks catch the error, as that of a refusal, they can connect again. Afterwards
the number of intra-op threads is what it was before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from paceline.errors import DeviceError, format_count
from paceline.job.cluster import Cluster
from paceline.job.cpu_count import find_cores
from paceline.job.membership import SetupDeadline
from paceline.observe.process_info import cache_folder
from paceline.recipe.recipe import Recipe
from paceline.session.arguments import TaskLike, resolve_task
from paceline.session.build import build_session
from paceline.session.callback import Callback
from paceline.session.reproducibility import request_equal_rows
from paceline.session.session import Session
from paceline.task import Task
from paceline.tasks.task_registry import load_task, run_build
from paceline.tuning.hardware_defaults import choose_threads


def choose_device(name: str, local_rank: int, num_processes: int) -> torch.device:
    """Return the device of this rank: with `auto` one GPU per process if there are enough, else the CPU.

    Raises:
        DeviceError: the recipe asks for "cuda", and there are fewer GPUs than processes.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "cuda" and count < num_processes:
        raise DeviceError(
            f'runtime.device = "cuda": this host has {format_count(count, "NVIDIA GPU")} for'
            f" {format_count(num_processes, 'process')}",
            next_step='start fewer processes, or set runtime.device = "auto" to use the CPU',
        )
    if name == "cpu" or count < num_processes:
        return torch.device("cpu")
    return torch.device("cuda", local_rank)


def idle_gpu_warning(configured: str, device: torch.device, num_processes: int) -> Iterator[str]:
    """Yield a warning if this host has GPUs that the job could use and does not.

    Args:
        configured: `runtime.device`.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if configured == "auto" and device.type == "cpu" and count:
        yield (
            f"warning: this host has {format_count(count, 'NVIDIA GPU')} for"
            f" {format_count(num_processes, 'process')},"
            f" so all of them use the CPU. Start at most {format_count(count, 'process')} to use the GPUs."
        )


@contextmanager
def connected(
    recipe: Recipe, cluster: Cluster | None = None, log: Callable[[str], object] = lambda text: None
) -> Iterator[tuple[Cluster, torch.device]]:
    """Set threads and device, connect to the other ranks, and disconnect at the end of the block.

    Args:
        cluster: in place of that of the environment.
        log: receives from time to time which ranks have not started yet; the limit is
            `runtime.setup_deadline_seconds`.
    """
    cluster = cluster or Cluster.from_env()
    device = choose_device(recipe.runtime.device, cluster.local_rank, cluster.local_world_size)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(choose_threads(recipe, cluster.local_world_size, find_cores()).number)
    completed = False
    try:
        runtime = recipe.runtime
        patience = SetupDeadline(runtime.setup_deadline_seconds, log)
        cluster = cluster.connect(device.type, runtime.deadline_seconds, patience)
        yield cluster, device
        completed = True
    finally:
        torch.set_num_threads(num_threads)
        if not completed:
            cluster.abandon()
    # Not in a `finally`: after an error the other ranks may be gone, and disconnecting would wait for
    # them.
    cluster.disconnect()


@contextmanager
def join(
    recipe: Recipe,
    task: TaskLike | None = None,
    *,
    base_dir: Path | None = None,
    cluster: Cluster | None = None,
    warn: Callable[[str], None] = lambda text: None,
    stop_requested: Callable[[], bool] = lambda: False,
    fresh: bool = True,
    callbacks: Sequence[Callback] = (),
) -> Iterator[Session]:
    """Connect to the other ranks, build this rank's session, and close both at the end of the block.

    Args:
        recipe: equal on every rank.
        task: in place of the one that the recipe names: a task, or a function that builds it. Prefer a
            function: it runs with the run's seed, so that the first weights follow from the recipe.
        base_dir: folder of a task `file.py:function`; the working directory if None.
        cluster: in place of that of the environment.
        warn, stop_requested, fresh: see `build_session`.
        callbacks: in addition to those of the task.
    """
    with connected(recipe, cluster, warn) as (joined, device):
        for text in idle_gpu_warning(recipe.runtime.device, device, joined.local_world_size):
            warn(text)
        built = build_task_on_all_ranks(recipe, task, base_dir, joined, warn)
        session = build_session(
            recipe, built, joined, device, warn=warn, stop_requested=stop_requested, fresh=fresh
        )
        session.add_callbacks(callbacks)
        try:
            yield session
        finally:
            session.close()
        if session.cluster.membership is not joined.membership:
            session.cluster.disconnect()  # the members have changed meanwhile


def build_task_on_all_ranks(
    recipe: Recipe,
    task: TaskLike | None,
    base_dir: Path | None,
    cluster: Cluster,
    log: Callable[[str], object] = lambda text: None,
) -> Task:
    """Build the task on every rank; each waits for the others, for at most `runtime.setup_deadline_seconds`.

    Raises:
        DeadlineError: a rank takes longer; the error names it.
    """
    seconds = recipe.runtime.setup_deadline_seconds
    # A task may load or tokenize data for minutes, so it has the deadline of the setup and not that
    # of a collective.
    cluster.enter_phase("building the task", seconds)
    built = build_task(recipe, task, base_dir)
    cluster.enter_phase("waiting for the other ranks to build the task", seconds)
    cluster.await_ranks("built the task", seconds, log)
    cluster.enter_phase("building the session", seconds)
    return built


def build_task(recipe: Recipe, task: TaskLike | None, base_dir: Path | None) -> Task:
    """Return the given task, the one that the given function builds, or the one that the recipe names."""
    if recipe.rl.total_steps:
        request_equal_rows()
    task = resolve_task(task)
    if isinstance(task, Task):
        return task
    options, folder = dict(recipe.options), base_dir or Path.cwd()
    if task is None:
        return load_task(recipe.task, options, recipe.seed, folder, cache_folder(), recipe)
    return run_build(task, task.__name__, options, recipe.seed, folder, cache_folder(), recipe)
