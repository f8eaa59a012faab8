"""Show the lines of a job where the caller looks: on a terminal, in a file, or below a cell of a notebook.

Start the processes of a call, show what they say, and take what rank 0 gives back.

The model of a run on other processes, in the process that has asked for it.

`paceline.train` and `paceline.verify`.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from paceline.api.remote_call import CallResult, RemoteCall
from paceline.errors import RecipeError, WorkerError
from paceline.job.cluster import Cluster
from paceline.launch.job_spec import LaunchJob, script_command
from paceline.launch.launcher import launch

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor, nn

    from paceline.parallel.session_context import Components
    from paceline.recipe.recipe import Recipe
    from paceline.session.arguments import RecipeLike, TaskLike
    from paceline.session.callback import Callback
    from paceline.session.fit_loop import Result
    from paceline.verification.verification_report import VerificationReport

_PROGRESS = "step "


@contextmanager
def open_line_output(console: Console | None) -> Iterator[Callable[[str], object]]:
    """What takes one line, or a text of several, at a time."""
    if console is not None:
        yield lambda text: console.print(text, markup=False, highlight=False, soft_wrap=True, end="")
        return
    lines = ProgressLines(_write, in_place="ipykernel" in sys.modules)
    try:
        yield lines.show
    finally:
        lines.close()


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


class ProgressLines:
    """Lines one below the other.

    Args:
        write: takes text.
        in_place: a line of progress takes the place of the one before it, as notebooks understand "\\r".
    """

    def __init__(self, write: Callable[[str], None], *, in_place: bool) -> None:
        self._write, self._in_place, self._standing = write, in_place, ""

    def show(self, text: str) -> None:
        """Show a text that ends with its line."""
        if self._in_place and text.startswith(_PROGRESS):
            line = text.rstrip("\n")
            self._write(("\r" if self._standing else "") + line.ljust(len(self._standing)))
            self._standing = line
            return
        self.close()
        self._write(text)

    def close(self) -> None:
        """Leave the last line of progress standing."""
        if self._standing:
            self._write("\n")
            self._standing = ""


def runs_here(processes: int | None) -> bool:
    """Whether this process is a rank itself.

    Raises:
        RecipeError: it is one, and another number of processes is asked for.
    """
    cluster = Cluster.from_env()
    if processes is None or not cluster.launched:
        return processes is None
    if processes != cluster.world_size:
        raise RecipeError(
            f"processes={processes}, and this script is one of {cluster.world_size} processes already",
            next_step="leave processes out; `paceline run` or torchrun says how many",
        )
    return True


def call_on_processes(
    function: Callable[..., Any],
    recipe: Any,
    task: Any,
    options: Mapping[str, Any],
    *,
    processes: int,
    console: Console | None = None,
    reports: bool = False,
) -> CallResult:
    """Call `function(recipe, task, **options)` on every rank of a job of its own.

    Ctrl-C, or the notebook's interrupt, asks the job to stop: it saves, and the call returns what came out.

    Args:
        console: where lines are shown; None: standard output, or the notebook.
        reports: see `RemoteCall`.
    Raises:
        WorkerError: a rank failed; its report has been shown.
    """
    from paceline.session.arguments import resolve_recipe

    resolved, base_dir = resolve_recipe(recipe, task, options["base_dir"])  # what is wrong is said at once
    order = RemoteCall(function, resolved, task, {**options, "base_dir": base_dir}, reports)
    with tempfile.TemporaryDirectory(prefix="paceline-call-") as folder, open_line_output(console) as say:
        order.save(Path(folder))
        outcome = launch(_launch_job(Path(folder), processes, resolved, saves=reports), say=say)
        given = CallResult.load(Path(folder))
    if outcome.failures or given is None:
        raise WorkerError(
            (outcome.report.splitlines() or [f"the processes ended with exit code {outcome.exit_code}"])[0],
            where=f"one of {processes} processes that this call has started",
            next_step="what it said stands above",
        )
    return given


def _launch_job(folder: Path, processes: int, recipe: Recipe, *, saves: bool) -> LaunchJob:
    return LaunchJob(
        command=script_command("-m", "paceline.api", str(folder)),
        num_processes=processes,
        threads=recipe.runtime.threads,
        output="shown",
        stuck_seconds=recipe.runtime.deadline_seconds,
        grace_seconds=recipe.checkpoint.grace_seconds if saves else LaunchJob.grace_seconds,
        announces=saves,
    )


def attach_model(result: Result, recipe: Any, task: Any, base_dir: Path | None) -> Result:
    """The result, with the whole trained model.

    Args:
        recipe, task, base_dir: of the call. A model that was given has the weights of the run afterwards, as
            if it had been trained here.
    """
    model = _model_of_task(task)
    if model is None and result.model is not None:
        return result
    weights = _final_weights(result)
    if weights is None:
        return result
    if model is None:
        model = _rebuild_model(recipe, task, base_dir)
    model.load_state_dict(weights)
    return replace(result, model=model)


def _model_of_task(task: Any) -> nn.Module | None:
    """Of a task or a tuple; None: a function builds it."""
    if isinstance(task, tuple):
        return task[0]
    return None if callable(task) else getattr(task, "model", None)


def _final_weights(result: Result) -> dict[str, Tensor] | None:
    """From rank 0's model if it held all of it, else from the last checkpoint."""
    from paceline.checkpoint.model_weights import find_checkpoint, model_weights_of, with_tied_names
    from paceline.checkpoint.storage import StorageFolder

    if result.model is not None:
        return result.model.state_dict()
    if result.checkpoint is None:
        return None
    folder, _, name = result.checkpoint.rpartition("/")
    found = find_checkpoint(StorageFolder(folder), lambda text: None, name)
    return with_tied_names(model_weights_of(found), found)


def _rebuild_model(recipe: Any, task: Any, base_dir: Path | None) -> nn.Module:
    from paceline.session.arguments import resolve_recipe
    from paceline.session.joining import build_task

    resolved, base_dir = resolve_recipe(recipe, task, base_dir)
    return build_task(resolved, task, base_dir).model


def train(
    recipe: RecipeLike,
    task: TaskLike | None = None,
    *,
    processes: int | None = None,
    base_dir: Path | None = None,
    resume: str | PathLike[str] | None = None,
    console: Console | None = None,
    name: str | None = None,
    callbacks: Sequence[Callback] = (),
) -> Result:
    """Train, on processes that are started for it or as one of however many there are.

    Args:
        recipe: what to do, or the path of its file.
        task: in place of the one that the recipe names; see `join`. A tuple (model, data, loss) is one too.
        processes: how many to start on this machine; None: this process is a rank itself, alone or started by
            `paceline run` or torchrun. Task and callbacks are sent to them by value.
        base_dir: see `join`; with a path as recipe: its folder.
        resume: a run folder, a checkpoint inside one, or a folder whose newest run is meant ("runs");
            continues it in its own folder.
        console: where rank 0 reports; None: nowhere, and with `processes` standard output or the notebook.
        name: what a new folder under `runs/` is called after, behind its time; the task's function if None.
        callbacks: beside those of the task. With `processes` they run there, and those of the caller
            take over the state that those of rank 0 have at the end.
    Returns:
        The result, equal on every rank but for the model. With `processes` the model is whole under every
        strategy: the one that was given, or one that `task` builds once more if no rank held all of it.
    Raises:
        WorkerError: a process that was started has failed; what it said is shown before.
    """
    from paceline.session.train_rank import train as train_here

    if runs_here(processes):
        return train_here(
            recipe, task, base_dir=base_dir, resume=resume, console=console, name=name, callbacks=callbacks
        )
    options = {"base_dir": base_dir, "resume": resume, "name": name or getattr(task, "__name__", None)}
    options |= {"callbacks": callbacks}
    given = call_on_processes(
        train_here, recipe, task, options, processes=cast(int, processes), console=console, reports=True
    )
    for callback, state in zip(callbacks, given.states, strict=True):
        callback.load_state_dict(state)
    return attach_model(given.result, recipe, task, base_dir)


def verify(
    recipe: RecipeLike,
    task: TaskLike | None = None,
    *,
    processes: int | None = None,
    steps: int = 20,
    base_dir: Path | None = None,
    cluster: Cluster | None = None,
    pieces: Components | None = None,
    observe: Callable[[int], None] = lambda step: None,
    strict: bool = False,
    loop: Callable[[Any], None] | None = None,
) -> VerificationReport:
    """Run the recipe's strategy and the oracle side by side for some steps.

    Args:
        recipe: equal on every rank; or the path of its file.
        task: in place of the one that the recipe names; see `join`.
        processes: see `train`.
        steps: how many to compare.
        base_dir: where a task `file.py:function` is looked for.
        cluster: in place of the one in the environment.
        pieces: exchanged parts of the session (a planted fault); the oracle is not affected.
        observe: called after every step that agreed, on every rank.
        strict: look also at what both sides share: whether the loss adds up over samples, its gradient is its
            derivative, and an update is made once.
        loop: your own loop, a function of what `own_loop` gives: its steps are compared, with its own losses.
    Returns:
        The report, equal on every rank.
    Raises:
        StrategyError: the strategy is approximate by nature.
        WorkerError: a process that was started has failed; what it said is shown before.
    """
    from paceline.verification.verify_on_rank import verify as verify_here

    options: dict[str, Any] = {"steps": steps, "base_dir": base_dir, "cluster": cluster, "pieces": pieces}
    options |= {"observe": observe, "strict": strict, "loop": loop}
    if runs_here(processes):
        return verify_here(recipe, task, **options)
    given = call_on_processes(verify_here, recipe, task, options, processes=cast(int, processes))
    return cast("VerificationReport", given.result)
