"""Become one of the ranks of a job: set up, meet the others, build the task together, and leave."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from paceline.cluster import Cluster
from paceline.cores import find_cores
from paceline.missing import Patience
from paceline.observe.process import cache_folder
from paceline.recipe import Recipe
from paceline.task import Task
from paceline.tasks import load_task, run_build
from paceline.training.build import build_session
from paceline.training.callback import Callback
from paceline.training.device import choose_device, idle_gpus
from paceline.training.given import TaskLike, given_task
from paceline.training.session import Session
from paceline.training.threads import choose_threads

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
        patience = Patience(runtime.setup_deadline_seconds, say)
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
        for text in idle_gpus(recipe.runtime.device, device, found.local_world_size):
            warn(text)
        built = obtain_together(recipe, task, base_dir, found, warn)
        session = build_session(
            recipe, built, found, device, warn=warn, stop_requested=stop_requested, fresh=fresh
        )
        session.listen(callbacks)
        try:
            yield session
        finally:
            session.close()


def obtain_together(
    recipe: Recipe,
    task: TaskLike | None,
    base_dir: Path | None,
    cluster: Cluster,
    say: Callable[[str], object] = lambda text: None,
) -> Task:
    """`obtain_task` on every rank; each waits for the others, for at most `runtime.setup_deadline_seconds`.

    Raises:
        DeadlineError: a rank takes longer than `runtime.setup_deadline_seconds`; names it.
    """
    seconds = recipe.runtime.setup_deadline_seconds
    cluster.enter_phase("building the task", seconds)
    built = obtain_task(recipe, task, base_dir)
    cluster.enter_phase("waiting for the other ranks to build the task", seconds)
    cluster.await_ranks("built the task", seconds, say)
    cluster.enter_phase("building the session", seconds)
    return built


def obtain_task(recipe: Recipe, task: TaskLike | None, base_dir: Path | None) -> Task:
    """The given task, what the given function builds, or the task that the recipe names."""
    task = given_task(task)
    if isinstance(task, Task):
        return task
    options, folder = dict(recipe.options), base_dir or Path.cwd()
    if task is None:
        return load_task(recipe.task, options, recipe.seed, folder, CACHE_DIR)
    return run_build(task, task.__name__, options, recipe.seed, folder, CACHE_DIR)
