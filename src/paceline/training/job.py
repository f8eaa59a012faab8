"""One rank of a job, from the recipe to the result: join the others, build, resume, fit, leave.

Whoever started the processes (Paceline's launcher, torchrun, nobody) does not matter here.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import FrameType

import torch
from rich.console import Console

from paceline import checkpoint
from paceline.cluster import Cluster
from paceline.comm import Net
from paceline.errors import CheckpointError
from paceline.mesh import Group
from paceline.observe import JsonLines, Progress, Sink
from paceline.recipe import Recipe, to_toml
from paceline.task import Task
from paceline.tasks import load_task
from paceline.training.build import build_session, choose_device
from paceline.training.fit import Result, fit
from paceline.training.session import Session

CACHE_DIR = Path.home() / ".cache" / "paceline"


@dataclass
class StopSignal:
    """Whether this process was asked to stop by SIGTERM or SIGINT; a second signal interrupts at once."""

    requested: bool = False

    def __call__(self) -> bool:
        return self.requested

    def receive(self, number: int, frame: FrameType | None) -> None:
        """The signal handler."""
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True


@contextmanager
def stop_on_signals() -> Iterator[StopSignal]:
    """Turn SIGTERM and SIGINT into a request to stop after the present step."""
    stop = StopSignal()
    before = {number: signal.signal(number, stop.receive) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def connected(recipe: Recipe, cluster: Cluster | None = None) -> Iterator[tuple[Cluster, torch.device]]:
    """Set up threads and the device, meet the other ranks, and leave at the end of the block.

    After an error it does not say goodbye: the others may be gone, and the process is about to end.
    """
    cluster = cluster or Cluster.from_env()
    device = choose_device(recipe.runtime.device, cluster.local_rank, cluster.local_world_size)
    torch.set_num_threads(recipe.runtime.threads or max(1, num_cores() // cluster.local_world_size))
    cluster.connect(device.type, recipe.runtime.deadline_seconds)
    yield cluster, device
    cluster.disconnect()


@contextmanager
def join(
    recipe: Recipe,
    task: Task | None = None,
    *,
    base_dir: Path | None = None,
    cluster: Cluster | None = None,
    warn: Callable[[str], None] = lambda text: None,
    stop_requested: Callable[[], bool] = lambda: False,
) -> Iterator[Session]:
    """Connect to the other ranks, build this rank's session, and leave at the end of the block.

    Args:
        recipe: equal on every rank.
        task: in place of the one that the recipe names.
        base_dir: where a task `file.py:function` is looked for; the working directory if None.
        cluster: in place of the one in the environment.
        warn: see `build_session`.
        stop_requested: see `EveryStep`.
    """
    with connected(recipe, cluster) as (found, device):
        task = task or load_task(
            recipe.task, dict(recipe.options), recipe.seed, base_dir=base_dir or Path.cwd(), cache_dir=CACHE_DIR
        )
        yield build_session(recipe, task, found, device, warn=warn, stop_requested=stop_requested)


def train(
    recipe: Recipe,
    task: Task | None = None,
    *,
    base_dir: Path | None = None,
    resume: Path | None = None,
    console: Console | None = None,
) -> Result:
    """Train on this rank, as one of however many there are.

    Args:
        recipe: what to do.
        task: in place of the one that the recipe names.
        base_dir: see `join`.
        resume: a run folder or a checkpoint inside one; continues it in its own folder.
        console: where rank 0 reports; quiet if None.
    Returns:
        The result, equal on every rank.
    """
    cluster = Cluster.from_env()
    talks = console if cluster.global_rank == 0 else None
    warn = talks.print if talks is not None else (lambda text: None)
    with (
        stop_on_signals() as stop,
        join(recipe, task, base_dir=base_dir, cluster=cluster, warn=warn, stop_requested=stop) as session,
    ):
        run_dir = prepare_run_dir(session, resume)
        if resume is not None:
            restore(session, resume)
        result = fit(session, run_dir, sinks(session, run_dir, talks))
        if talks is not None:
            conclude(session, result, run_dir, talks)
        return result


def restore(session: Session, resume: Path) -> None:
    """Load the newest checkpoint of a run folder, or the given one."""
    path = resume if (resume / "state.json").exists() else checkpoint.latest(resume / "checkpoints")
    if path is None:
        raise CheckpointError(
            "there is no checkpoint to resume from",
            where=str(resume),
            next_step="name a run folder with a checkpoints folder in it",
        )
    found = checkpoint.load(path)
    session.state.load(found.tensors, found.scalars)


def prepare_run_dir(session: Session, resume: Path | None) -> Path:
    """The folder of the run, the same on every rank; rank 0 makes it and writes the recipe there."""
    if resume is not None:
        chosen = str(run_of(resume))
    else:
        chosen = session.recipe.run_dir or _new_name(session.recipe.task)
    chosen = share_text(chosen, session.net, session.mesh.world, session.placed.device)
    run_dir = Path(chosen)
    if session.is_first:
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / "recipe.toml").write_text(to_toml(session.recipe), encoding="utf-8")
    return run_dir


def run_of(resume: Path) -> Path:
    """The run folder of a run folder, or of a checkpoint inside one."""
    return resume.parent.parent if (resume / "state.json").exists() else resume


def _new_name(task: str) -> str:
    name = Path(task.partition(":")[0]).stem
    return str(Path("runs") / f"{datetime.now():%Y%m%d-%H%M%S}-{name}-{os.getpid()}")


def share_text(text: str, net: Net, group: Group, device: torch.device) -> str:
    """Rank 0's text on every rank. Wire: two small broadcasts."""
    data = torch.tensor(list(text.encode()), dtype=torch.uint8, device=device)
    size = net.broadcast(torch.tensor([data.numel()], device=device), group).wait()
    buffer = data if group.rank == 0 else torch.zeros(int(size), dtype=torch.uint8, device=device)
    return bytes(net.broadcast(buffer, group).wait().tolist()).decode()


def sinks(session: Session, run_dir: Path, console: Console | None) -> list[Sink]:
    """Rank 0 writes metrics, and shows progress where there is a console."""
    if not session.is_first:
        return []
    found: list[Sink] = [JsonLines(run_dir / "metrics.jsonl")]
    if console is not None:
        tokens = session.task.num_tokens_per_sample
        found.append(Progress(console, session.state.step, session.num_steps, tokens))
    return found


def conclude(session: Session, result: Result, run_dir: Path, console: Console) -> None:
    """Print what came out, where it is, and how to go on."""
    if session.task.report is not None and result.evaluation is not None:
        evaluation = {"loss": result.evaluation.loss, **result.evaluation.metrics}
        for line in session.task.report(session.placed.model, evaluation):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    recipe = session.recipe
    longer = f"epochs={2 * recipe.epochs:g}" if recipe.epochs is not None else f"steps={2 * session.num_steps}"
    more = "" if result.stopped else f" --set {longer}"
    for name, value in (
        ("checkpoint", result.checkpoint),
        ("metrics", run_dir / "metrics.jsonl"),
        ("resume", f"paceline train --resume {run_dir} -n {session.cluster.world_size}{more}"),
    ):
        console.print(f"{name + ':':<12}{value}", markup=False, highlight=False, soft_wrap=True)


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))

