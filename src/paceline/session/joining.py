"""On what a process computes: an NVIDIA GPU of its own, or the processor.

Become one of the ranks of a job: set up, meet the others, build the task together, and leave.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from paceline.errors import DeviceError
from paceline.job.cluster import Cluster
from paceline.job.cpu_count import find_cores
from paceline.job.membership import SetupDeadline
from paceline.observe.process_info import cache_folder
from paceline.recipe.recipe import Recipe
from paceline.session.arguments import TaskLike, resolve_task
from paceline.session.build import build_session
from paceline.session.callback import Callback
from paceline.session.session import Session
from paceline.task import Task
from paceline.tasks.task_registry import load_task, run_build
from paceline.tuning.hardware_defaults import choose_threads


def choose_device(name: str, local_rank: int, processes_here: int) -> torch.device:
    """`auto` takes one NVIDIA GPU a process where there are enough, the processor otherwise.

    Raises:
        DeviceError: "cuda" was asked for and is not there.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "cuda" and count < processes_here:
        raise DeviceError(
            f'runtime.device = "cuda": this host has {count} NVIDIA GPUs for {processes_here} processes',
            next_step='start fewer processes, or set runtime.device = "auto" to use the processor',
        )
    if name == "cpu" or count < processes_here:
        return torch.device("cpu")
    return torch.device("cuda", local_rank)


def idle_gpu_warning(asked: str, device: torch.device, processes_here: int) -> Iterator[str]:
    """A sentence if there are GPUs and this job uses none of them though it was free to.

    Args:
        asked: `runtime.device`.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if asked == "auto" and device.type == "cpu" and count:
        yield (
            f"this host has {count} NVIDIA GPUs for {processes_here} processes, so all compute on the"
            f" processor; with at most {count} processes each has a GPU"
        )


CACHE_DIR = cache_folder()


@contextmanager
def connected(
    recipe: Recipe, cluster: Cluster | None = None, say: Callable[[str], object] = lambda text: None
) -> Iterator[tuple[Cluster, torch.device]]:
    """Set up threads and the device, meet the other ranks, and leave at the end of the block.

    After an error it closes no connection: the other ranks may be gone, and the process is about to end.
    The number of intra-op threads is afterwards what it was. `say` is told now and then which ranks have not
    started; they may take as long as setting up may.
    """
    cluster = cluster or Cluster.from_env()
    device = choose_device(recipe.runtime.device, cluster.local_rank, cluster.local_world_size)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(choose_threads(recipe, cluster.local_world_size, find_cores()).number)
    try:
        runtime = recipe.runtime
        patience = SetupDeadline(runtime.setup_deadline_seconds, say)
        cluster = cluster.connect(device.type, runtime.deadline_seconds, patience)
        yield cluster, device
    finally:
        torch.set_num_threads(num_threads)
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
    """Connect to the other ranks, build this rank's session, and leave at the end of the block.

    Args:
        recipe: equal on every rank.
        task: in place of the one that the recipe names: a task, or the function that builds it. A
            function is better: it runs under the run's own seed, so that weights follow from the recipe.
        base_dir: where a task `file.py:function` is looked for; the working directory if None.
        cluster: in place of the one in the environment.
        warn: see `build_session`.
        stop_requested: see `EveryStep`.
        fresh: see `build_session`.
        callbacks: beside those of the task.
    """
    with connected(recipe, cluster, warn) as (found, device):
        for text in idle_gpu_warning(recipe.runtime.device, device, found.local_world_size):
            warn(text)
        built = build_task_on_all_ranks(recipe, task, base_dir, found, warn)
        session = build_session(
            recipe, built, found, device, warn=warn, stop_requested=stop_requested, fresh=fresh
        )
        session.add_callbacks(callbacks)
        try:
            yield session
        finally:
            session.close()


def build_task_on_all_ranks(
    recipe: Recipe,
    task: TaskLike | None,
    base_dir: Path | None,
    cluster: Cluster,
    say: Callable[[str], object] = lambda text: None,
) -> Task:
    """`build_task` on every rank; each waits for the others, for at most `runtime.setup_deadline_seconds`.

    Raises:
        DeadlineError: a rank takes longer than `runtime.setup_deadline_seconds`; names it.
    """
    seconds = recipe.runtime.setup_deadline_seconds
    cluster.enter_phase("building the task", seconds)
    built = build_task(recipe, task, base_dir)
    cluster.enter_phase("waiting for the other ranks to build the task", seconds)
    cluster.await_ranks("built the task", seconds, say)
    cluster.enter_phase("building the session", seconds)
    return built


def build_task(recipe: Recipe, task: TaskLike | None, base_dir: Path | None) -> Task:
    """The given task, what the given function builds, or the task that the recipe names."""
    task = resolve_task(task)
    if isinstance(task, Task):
        return task
    options, folder = dict(recipe.options), base_dir or Path.cwd()
    if task is None:
        return load_task(recipe.task, options, recipe.seed, folder, CACHE_DIR)
    return run_build(task, task.__name__, options, recipe.seed, folder, CACHE_DIR)
