"""One rank of a job, from the recipe to the result: join, build, restore, fit, print a summary, leave.

It does not matter here what has started the processes (Paceline's launcher, torchrun, or nothing).
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from os import PathLike
from pathlib import Path

from rich.console import Console
from torch import nn

from paceline.errors import CommunicationError
from paceline.job.cluster import Cluster
from paceline.job.launcher_reports import LEAVING, following_abort_requests
from paceline.observe.sinks import METRICS, Sink
from paceline.observe.terminal_text import escape_controls
from paceline.recipe.recipe import Recipe
from paceline.recipe.recipe_loading import load_recipe
from paceline.recipe.recovery import recovery_of
from paceline.report.html_page import write_report
from paceline.report.run_files import RECIPE, REPORT
from paceline.session import run_folder
from paceline.session.arguments import RecipeLike, TaskLike, resolve_recipe, resolve_run, run_name_of_call
from paceline.session.callback import Callback
from paceline.session.fit_loop import Result, fit, fitting
from paceline.session.membership_change import (
    RankLeavesError,
    TaskBuilder,
    continue_after_loss,
    end_waits_for_lost,
    joining,
    leave_job,
)
from paceline.session.own_loop_steps import OwnLoop
from paceline.session.private_training import open_ledger
from paceline.session.session import Session, repeat_until_agreed
from paceline.session.sink_setup import build_sinks
from paceline.session.start_rank import build_task, join
from paceline.session.stop_signals import StopRequest, stop_on_notice, stop_on_signals
from paceline.watch.run_tail import last_recorded_step


def print_summary(
    session: Session, result: Result, run_dir: Path, console: Console, whole: nn.Module | None
) -> None:
    """Print the task's report, where the results are, and how to resume.

    Args:
        whole: the whole model, if the task reports on it.
    """
    lines: list[str] = []
    if session.task.report is not None and result.evaluation is not None and whole is not None:
        evaluation = result.evaluation
        values = {"loss": evaluation.loss, "count": evaluation.num_items, **evaluation.metrics}
        lines += session.task.report(whole, values)
    num_ranks, longer = session.cluster.world_size, _longer_run_option(session, result)
    resume = f"paceline train --resume {run_dir} -n {num_ranks}{longer}"
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
    """Return a function that prints text without wrapping, colours or markup; a no-op without a console."""
    if console is None:
        return lambda text: None
    show = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    return lambda text: show(escape_controls(text))


def _longer_run_option(session: Session, result: Result) -> str:
    """Return options that make a complete run longer, without which it would end at once when resumed."""
    if result.stopped:
        return ""
    epochs, environment_steps = session.recipe.epochs, session.recipe.rl.total_steps
    if environment_steps:
        return f" --set rl.total_steps={2 * environment_steps}"
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
    until: str | None = None,
) -> Result:
    """Train on this rank of a job of any size.

    Args:
        recipe, task, base_dir, resume, name: see `paceline.train`, which also starts processes.
        console: where rank 0 prints; None: nothing is printed.
        callbacks: in addition to those of the task.
        until: see `fit`.
    Returns:
        The result, equal on every rank.
    """
    begin = _join_run if Cluster.from_env().joins else _begin_run
    with begin(recipe, task, base_dir, resume, console, name, callbacks) as run:
        recipe = run.session.recipe
        run.session.is_elastic = recovery_of(recipe).kind == "in process" and run.can_rebuild
        run.session.cluster.enter_phase(run.session.launcher_phase)
        recover = run.recover if run.session.is_elastic else None
        launcher = run.session.cluster.error_dir if run.session.is_elastic else None
        try:
            with following_abort_requests(launcher, partial(end_waits_for_lost, run.session)):
                result = fit(run.session, run.folder, run.sinks, until, recover)
            return run.end(result)
        except RankLeavesError:
            leave_job(run.session)
            # As after an error: the end of the interpreter would wait for groups that the others still use.
            sys.stdout.flush()
            os._exit(0)


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
    """Start a run whose loop you write: `for batch in loop.batches(): ...; loop.backward(loss); loop.step()`.

    Run folder, checkpoints, evaluations, resume, callbacks and Ctrl-C work as in `train`. At the end of
    the block the state is saved and evaluated, and `loop.result` is set.

    Args:
        recipe, task, base_dir, resume, console, name, callbacks: see `train`. The loss of the task is used in
            evaluations, and in the checks at the start.
    Raises:
        StrategyError: under this strategy a loop cannot call the model; the error has the reason.
    """
    starting = _begin_run(recipe, task, base_dir, resume, console, name, callbacks)
    with starting as run, fitting(run.session, run.folder, run.sinks) as fit_in_progress:
        loop = OwnLoop(run.session, fit_in_progress)
        yield loop
        loop.end()
        loop.result = run.end(fit_in_progress.finish())


@dataclass
class _RunInProgress:
    """Run that has begun: its session, folder and sinks.

    Args:
        job_console: where rank 0 prints, whichever process that is.
        rebuild_task: builds the task again; None: the call has passed a task that is built.
        callbacks: those of the call.
    """

    session: Session
    folder: Path
    sinks: Sequence[Sink]
    job_console: Console | None
    rebuild_task: TaskBuilder | None = None
    callbacks: Sequence[Callback] = ()

    @property
    def can_rebuild(self) -> bool:
        """Return whether the session can be built again for other members, where that is needed."""
        return self.session.copies is None or self.rebuild_task is not None

    @property
    def console(self) -> Console | None:
        """Return the console of rank 0; None on all other ranks."""
        return self.job_console if self.session.is_first else None

    def recover(self, error: CommunicationError) -> Sequence[Sink]:
        """Continue on the remaining ranks; return the sinks of this rank; collective.

        Raises:
            CommunicationError: no rank is lost, or the job cannot continue without it.
        """
        session, started = self.session, time.monotonic()
        model = session.runner.sharded_model.model
        change = continue_after_loss(session, error, self.rebuild_task)
        is_rebuilt = session.runner.sharded_model.model is not model
        if is_rebuilt:
            session.add_callbacks(self.callbacks)
        if session.is_first and (change.has_new_first or is_rebuilt):
            run_folder.lock_folder(session, self.folder)
        if change.has_new_first:
            for sink in self.sinks:
                sink.close()
            if session.is_first:
                session.recorded_step = last_recorded_step(self.folder)
            self.sinks = build_sinks(session, self.folder, self.console)
        _, last = session.reported
        # A rank can be lost after a step and before its record is written.
        if last is not None and last.step > session.recorded_step:
            session.recorded_step = last.step
            for sink in self.sinks:
                sink.step(last)
        record = {
            "step": session.state.step,
            "lost": list(change.lost),
            "joined": list(change.joined),
            "ranks": session.cluster.world_size,
            "takes_over": change.has_new_first,
            "seconds": time.monotonic() - started,
            "cause": error.what,
        }
        for sink in self.sinks:
            sink.event("members", record)
        return self.sinks

    def end(self, result: Result) -> Result:
        """Write the report page, print the summary, and return the result with its model; collective."""
        session = self.session
        session.cluster.enter_phase(LEAVING, session.recipe.runtime.setup_deadline_seconds)
        # From here on the model has the averaged weights, which the report and the returned model
        # show.
        average = session.average
        if average is not None:
            repeat_until_agreed(session, lambda: average.put(session.mesh.world))
        needs_whole = session.task.report is not None and result.evaluation is not None
        whole = repeat_until_agreed(session, session.complete) if needs_whole else None
        result = replace(result, model=session.local_whole_model())
        if session.is_first:
            write_report_page(self.folder, plain_printer(self.console))
        if self.console is not None:
            print_summary(session, result, self.folder, self.console, whole)
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
    """Join the other ranks and build the session; restore it if the run is resumed."""
    name = name or run_name_of_call(recipe, task)
    recipe, base_dir = resolve_recipe(recipe, task, base_dir)
    resumed_run, cluster = resolve_run(resume), Cluster.from_env()
    job_console, console = console, console if cluster.global_rank == 0 else None
    warn = plain_printer(console)
    source = run_folder.find_checkpoint_to_resume(recipe, resumed_run, warn)
    joins = partial(join, recipe, task, base_dir=base_dir, cluster=cluster, warn=warn, callbacks=callbacks)
    with (
        stop_on_signals(StopRequest(setting_up=True, has_launcher=cluster.error_dir is not None)) as stop,
        stop_on_notice(recipe.checkpoint.notice, stop),
        joins(stop_requested=stop, fresh=source is None) as session,
    ):
        folder = run_folder.prepare_folder(session, resumed_run, name)
        checkpoint = None if source is None else run_folder.restore_run(session, source, warn)
        open_ledger(session, folder)
        # There is a state to save now, so from here on a signal waits for the end of a step.
        stop.setting_up = False
        cluster.enter_phase(session.launcher_phase)
        sinks = build_sinks(session, folder, console, checkpoint)
        rebuild = _task_builder(session.recipe, task, base_dir)
        yield _RunInProgress(session, folder, sinks, job_console, rebuild, callbacks)
    cluster.enter_phase(LEAVING)  # no deadline: the script may continue for any time


@contextmanager
def _join_run(
    recipe: RecipeLike,
    task: TaskLike | None,
    base_dir: Path | None,
    resume: str | PathLike[str] | None,
    console: Console | None,
    name: str | None,
    callbacks: Sequence[Callback],
) -> Iterator[_RunInProgress]:
    """Join the running job of this launcher in place of a lost process, with the state of its members."""
    recipe, base_dir = resolve_recipe(recipe, task, base_dir)
    resumed_run, cluster = resolve_run(resume), Cluster.from_env()
    folder = Path(recipe.run_dir or "") if resumed_run is None else run_folder.run_folder_of(resumed_run)
    # The folder keeps the recipe with what was chosen when the run began, such as its number format.
    recipe = load_recipe(folder / RECIPE)
    with (
        stop_on_signals(StopRequest(setting_up=True, has_launcher=cluster.error_dir is not None)) as stop,
        joining(recipe, cluster, task, base_dir, stop_requested=stop, callbacks=callbacks) as session,
    ):
        stop.setting_up = False
        session.is_elastic = True
        session.cluster.enter_phase(session.launcher_phase)
        rebuild = _task_builder(recipe, task, base_dir)
        yield _RunInProgress(session, folder, [], console, rebuild, callbacks)
    cluster.enter_phase(LEAVING)


def _task_builder(recipe: Recipe, task: TaskLike | None, base_dir: Path | None) -> TaskBuilder | None:
    """Return a function that builds the task of a run again; None for a task that the call has built."""
    return partial(build_task, recipe, task, base_dir) if task is None or callable(task) else None


def write_report_page(run_dir: Path, warn: Callable[[str], None]) -> None:
    """Write the report page; warn if the disk is full, which must not fail a complete run."""
    try:
        write_report(run_dir)
    except OSError as error:
        warn(
            f"warning: cannot write the report: {error}. Free some space and run `paceline report {run_dir}`."
        )
