"""What a run prints at its end.

One rank of a job, from the recipe to the result: join the others, build, resume, fit, leave.

Whoever started the processes (Paceline's launcher, torchrun, nobody) does not matter here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from os import PathLike
from pathlib import Path

from rich.console import Console
from torch import nn

from paceline.job.cluster import Cluster
from paceline.job.launcher_reports import LEAVING
from paceline.observe.sinks import METRICS, Sink
from paceline.report.html_page import write_report
from paceline.report.run_files import REPORT
from paceline.session import run_folder
from paceline.session.arguments import RecipeLike, TaskLike, resolve_recipe, resolve_run
from paceline.session.callback import Callback
from paceline.session.fit_loop import Result, fit, fitting
from paceline.session.joining import join
from paceline.session.own_loop_steps import OwnLoop
from paceline.session.session import Session, repeat_until_agreed
from paceline.session.sink_setup import build_sinks
from paceline.session.stop_signals import StopRequest, stop_on_notice, stop_on_signals


def print_summary(
    session: Session, result: Result, run_dir: Path, console: Console, whole: nn.Module | None
) -> None:
    """Print what came out, where it is, and how to go on.

    Args:
        whole: the whole model, if the task reports on it.
    """
    lines: list[str] = []
    if session.task.report is not None and result.evaluation is not None and whole is not None:
        found = result.evaluation
        values = {"loss": found.loss, "count": found.num_items, **found.metrics}
        lines += session.task.report(whole, values)
    resume = f"paceline train --resume {run_dir} -n {session.cluster.world_size}{_longer_run_option(session, result)}"
    if result.sha256 is not None:
        lines.append(f"state sha256: {result.sha256}")
    lines += [
        f"checkpoint: {result.checkpoint}",
        f"metrics:    {run_dir / METRICS}",
        f"report:     {run_dir / REPORT}",
        f"resume:     {resume}",
    ]
    for line in lines:
        plain_printer(console)(line)


def plain_printer(console: Console | None) -> Callable[[str], None]:
    """Prints a text as it is, never wrapped, coloured or read as markup; nothing without a console."""
    if console is None:
        return lambda text: None
    return partial(console.print, markup=False, highlight=False, soft_wrap=True)


def _longer_run_option(session: Session, result: Result) -> str:
    """A run that has reached its end goes on only if it is made longer."""
    if result.stopped:
        return ""
    epochs = session.recipe.epochs
    return f" --set epochs={2 * epochs:g}" if epochs is not None else f" --set steps={2 * session.num_steps}"


def train(
    recipe: RecipeLike,
    task: TaskLike | None = None,
    *,
    base_dir: Path | None = None,
    resume: str | PathLike[str] | None = None,
    console: Console | None = None,
    name: str | None = None,
    callbacks: Sequence[Callback] = (),
) -> Result:
    """Train on this rank, as one of however many there are.

    Args:
        recipe, task, base_dir, resume, name: see `paceline.train`, which starts processes as well.
        console: where rank 0 reports; quiet if None.
        callbacks: beside those of the task.
    Returns:
        The result, equal on every rank.
    """
    begun = _begin_run(recipe, task, base_dir, resume, console, name, callbacks)
    with begun as run:
        return run.end(fit(run.session, run.folder, run.sinks))


@contextmanager
def own_loop(
    recipe: RecipeLike,
    task: TaskLike | None = None,
    *,
    base_dir: Path | None = None,
    resume: str | PathLike[str] | None = None,
    console: Console | None = None,
    name: str | None = None,
    callbacks: Sequence[Callback] = (),
) -> Iterator[OwnLoop]:
    """A run whose loop you write: `for batch in loop.batches(): ...; loop.backward(loss); loop.step()`.

    Run folder, checkpoints, evaluations, resume, callbacks and Ctrl-C are those of `train`; at the end of the
    block the state is saved and evaluated, and `loop.result` says how the run ended.

    Args:
        recipe, task, base_dir, resume, console, name, callbacks: see `train`. The loss of the task is called
            in evaluations, and once at the start to see that it adds up.
    Raises:
        StrategyError: under this strategy no loop can call the model; says why.
    """
    begun = _begin_run(recipe, task, base_dir, resume, console, name, callbacks)
    with begun as run, fitting(run.session, run.folder, run.sinks) as found:
        loop = OwnLoop(run.session, found)
        yield loop
        loop.end()
        loop.result = run.end(found.finish())


@dataclass(frozen=True)
class _RunInProgress:
    """A run that has begun.

    Args:
        talks: where this rank reports.
    """

    session: Session
    folder: Path
    sinks: Sequence[Sink]
    talks: Console | None

    def end(self, result: Result) -> Result:
        """Say what came out; collective."""
        session = self.session
        session.cluster.enter_phase(LEAVING, session.recipe.runtime.setup_deadline_seconds)
        average = session.average
        if average is not None:
            repeat_until_agreed(session, lambda: average.put(session.mesh.world))
        wanted = session.task.report is not None and result.evaluation is not None
        whole = session.complete() if wanted else None
        result = replace(result, model=session.local_whole_model())
        if session.is_first:
            write_report_page(self.folder, plain_printer(self.talks))
        if self.talks is not None:
            print_summary(session, result, self.folder, self.talks, whole)
        return result


@contextmanager
def _begin_run(
    recipe: RecipeLike,
    task: TaskLike | None,
    base_dir: Path | None,
    resume: str | PathLike[str] | None,
    console: Console | None,
    name: str | None,
    callbacks: Sequence[Callback],
) -> Iterator[_RunInProgress]:
    """Join the others, and restore if the run is not new."""
    recipe, base_dir = resolve_recipe(recipe, task, base_dir)
    before, cluster = resolve_run(resume), Cluster.from_env()
    talks = console if cluster.global_rank == 0 else None
    warn = plain_printer(talks)
    source = run_folder.find_checkpoint_to_resume(recipe, before, warn)
    joins = partial(join, recipe, task, base_dir=base_dir, cluster=cluster, warn=warn, callbacks=callbacks)
    with (
        stop_on_signals(StopRequest(setting_up=True, has_launcher=cluster.error_dir is not None)) as stop,
        stop_on_notice(recipe.checkpoint.notice, stop),
        joins(stop_requested=stop, fresh=source is None) as session,
    ):
        folder = run_folder.prepare_folder(session, before, name or _function_name(task))
        used = None if source is None else run_folder.restore_run(session, source, warn)
        stop.setting_up = False
        cluster.enter_phase(session.launcher_phase)
        yield _RunInProgress(session, folder, build_sinks(session, folder, talks, used), talks)
    cluster.enter_phase(LEAVING)  # a script may go on for as long as it likes


def _function_name(task: TaskLike | None) -> str | None:
    """What a run of this function is called; None if it is the recipe's to say."""
    return getattr(task, "__name__", None)


def write_report_page(run_dir: Path, warn: Callable[[str], None]) -> None:
    """The page of the run; a disk that has no room for it takes nothing from the run."""
    try:
        write_report(run_dir)
    except OSError as error:
        warn(f"the report cannot be written: {error}; free space, then `paceline report {run_dir}`")
