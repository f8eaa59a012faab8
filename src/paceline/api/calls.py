"""`paceline.train` and `paceline.verify`: calls on this process, or on processes that are started for them.

With `processes` the call is pickled to a folder, a job makes it on every rank, its lines are printed where
the caller looks (terminal, file or notebook cell), and the result of rank 0 comes back with the trained
model.
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
from paceline.errors import RecipeError, WorkerError, format_count
from paceline.job.cluster import Cluster
from paceline.launch.job_spec import LaunchJob, script_command
from paceline.launch.launcher import launch
from paceline.launch.shutdown import ShutdownTimeouts

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor, nn

    from paceline.parallel.session_context import Components
    from paceline.recipe.recipe import Recipe
    from paceline.search import Study
    from paceline.session.arguments import RecipeLike, TaskLike
    from paceline.session.callback import Callback
    from paceline.session.fit_loop import Result
    from paceline.verification.verification_report import VerificationReport

_PROGRESS = "step "


@contextmanager
def open_line_output(console: Console | None) -> Iterator[Callable[[str], object]]:
    """Yield a function that prints one or more lines of the job."""
    if console is not None:
        yield lambda text: console.print(text, markup=False, highlight=False, soft_wrap=True, end="")
        return
    lines = ProgressLines(_write, in_place="ipykernel" in sys.modules)
    try:
        yield lines.show
    finally:
        lines.close()


def _write(text: str) -> None:
    # A notebook shows nothing until the stream is flushed.
    sys.stdout.write(text)
    sys.stdout.flush()


class ProgressLines:
    """Output that can replace a line of progress by the next one.

    Args:
        write: writes text.
        in_place: overwrite the previous line of progress with "\\r", which notebooks support.
    """

    def __init__(self, write: Callable[[str], None], *, in_place: bool) -> None:
        self._write, self._in_place, self._last_progress = write, in_place, ""

    def show(self, text: str) -> None:
        """Print a text that ends with a newline."""
        if self._in_place and text.startswith(_PROGRESS):
            line = text.rstrip("\n")
            # Padded, so that nothing of a longer line before it remains visible.
            self._write(("\r" if self._last_progress else "") + line.ljust(len(self._last_progress)))
            self._last_progress = line
            return
        self.close()
        self._write(text)

    def close(self) -> None:
        """End the last line of progress, so that it stays visible."""
        if self._last_progress:
            self._write("\n")
            self._last_progress = ""


def runs_here(processes: int | None) -> bool:
    """Return whether the call runs in this process, as one of the ranks.

    Raises:
        RecipeError: this process is a rank of a job with another number of processes.
    """
    cluster = Cluster.from_env()
    if processes is None or not cluster.launched:
        return processes is None
    if processes != cluster.world_size:
        raise RecipeError(
            f"processes={processes}, but this script already runs on"
            f" {format_count(cluster.world_size, 'process')}",
            next_step="leave processes out: `paceline run` or torchrun sets the number",
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

    Ctrl-C, or the interrupt of a notebook, stops the job: it saves, and the call returns the result so far.

    Args:
        console: where lines are printed; None: standard output, or the notebook.
        reports: the function takes a console, on which rank 0 prints.
    Raises:
        WorkerError: a rank failed; its report has been printed.
    """
    from paceline.session.arguments import resolve_recipe

    # resolved here as well, so that an error in the recipe is raised before any process starts
    resolved, base_dir = resolve_recipe(recipe, task, options["base_dir"])
    call = RemoteCall(function, resolved, task, {**options, "base_dir": base_dir}, reports)
    with tempfile.TemporaryDirectory(prefix="paceline-call-") as folder, open_line_output(console) as log:
        call.save(Path(folder))
        outcome = launch(_launch_job(Path(folder), processes, resolved, saves=reports), log=log)
        result = CallResult.load(Path(folder))
    if outcome.failures or result is None:
        raise WorkerError(
            (outcome.report.splitlines() or [f"the processes ended with exit code {outcome.exit_code}"])[0],
            where=f"a rank of the job of {format_count(processes, 'process')} that this call started",
            next_step="read the report above",
        )
    return result


def _launch_job(folder: Path, processes: int, recipe: Recipe, *, saves: bool) -> LaunchJob:
    return LaunchJob(
        command=script_command("-m", "paceline.api", str(folder)),
        num_processes=processes,
        threads=recipe.runtime.threads,
        output="shown",
        timeouts=ShutdownTimeouts(
            stuck_seconds=recipe.runtime.deadline_seconds,
            grace_seconds=recipe.checkpoint.grace_seconds if saves else ShutdownTimeouts.grace_seconds,
        ),
        announces=saves,
    )


def attach_model(result: Result, recipe: Any, task: Any, base_dir: Path | None) -> Result:
    """Return the result with the whole trained model.

    A model that the caller passed gets the weights of the run, as if it had been trained in this process.

    Args:
        recipe, task, base_dir: the arguments of the call.
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
    """Return the model of a task or a tuple; None if a function builds it."""
    if isinstance(task, tuple):
        return task[0]
    return None if callable(task) else getattr(task, "model", None)


def _final_weights(result: Result) -> dict[str, Tensor] | None:
    """Return the weights of rank 0's model if it is whole, else those of the last checkpoint."""
    from paceline.checkpoint.model_weights import find_checkpoint, model_weights_of, with_tied_names
    from paceline.checkpoint.storage import StorageFolder

    if result.model is not None:
        return result.model.state_dict()
    if result.checkpoint is None:
        return None
    folder, _, name = result.checkpoint.rpartition("/")
    checkpoint = find_checkpoint(StorageFolder(folder), lambda text: None, name)
    return with_tied_names(model_weights_of(checkpoint), checkpoint)


def _rebuild_model(recipe: Any, task: Any, base_dir: Path | None) -> nn.Module:
    from paceline.session.arguments import resolve_recipe
    from paceline.session.start_rank import build_task

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
    """Train on this process as one of the ranks, or on processes that are started for the call.

    Args:
        recipe: a recipe, or the path of its file.
        task: replaces the task that the recipe names, as in `join`. A tuple (model, data, loss) is accepted.
        processes: number of processes to start on this machine; None: this process is a rank itself, alone or
            started by `paceline run` or torchrun. Task and callbacks are pickled by value.
        base_dir: folder of a task `file.py:function`, as in `join`; default: that of the recipe file.
        resume: a run folder, a checkpoint inside one, or a folder of runs, of which the newest is resumed
            ("runs"). The run continues in its own folder.
        console: where rank 0 prints; None: nowhere, or with `processes` standard output or the notebook.
        name: name of the new folder in `runs/`, after its time; None: that of the recipe's file or the task's
            function, or of the function's file if it is called "build".
        callbacks: in addition to those of the task. With `processes` they run in those processes, and the
            caller's objects get the state of those of rank 0 at the end.
    Returns:
        The result, equal on every rank except for the model. With `processes` the model is whole with every
        strategy: the one that was passed, or one that `task` builds again if no rank held all of it.
    Raises:
        WorkerError: a process that was started has failed; its report has been printed.
    """
    from paceline.session.arguments import run_name_of_call
    from paceline.session.train_rank import train as train_here

    if runs_here(processes):
        return train_here(
            recipe, task, base_dir=base_dir, resume=resume, console=console, name=name, callbacks=callbacks
        )
    options: dict[str, Any] = {"base_dir": base_dir, "resume": resume, "callbacks": callbacks}
    options["name"] = name or run_name_of_call(recipe, task)
    call = call_on_processes(
        train_here, recipe, task, options, processes=cast(int, processes), console=console, reports=True
    )
    # The processes had copies of the callbacks; all ranks' copies have the same state.
    for callback, state in zip(callbacks, call.states, strict=True):
        callback.load_state_dict(state)
    return attach_model(call.result, recipe, task, base_dir)


def verify(
    recipe: RecipeLike,
    task: TaskLike | None = None,
    *,
    processes: int | None = None,
    steps: int = 20,
    base_dir: Path | None = None,
    cluster: Cluster | None = None,
    components: Components | None = None,
    observe: Callable[[int], None] = lambda step: None,
    strict: bool = False,
    loop: Callable[[Any], None] | None = None,
) -> VerificationReport:
    """Compare the recipe's strategy with a single-process oracle for some steps.

    Args:
        recipe: a recipe, equal on every rank, or the path of its file.
        task: replaces the task that the recipe names, as in `join`.
        processes: number of processes to start, as in `train`.
        steps: number of steps to compare.
        base_dir: folder of a task `file.py:function`.
        cluster: replaces the cluster of the environment.
        components: replaced parts of the session (a planted fault); the oracle is not affected.
        observe: called on every rank after every step that agreed.
        strict: also check code that both sides share: that the loss adds up over samples, that its gradient
            is its derivative, and that an update is made once.
        loop: your own training loop, a function of what `own_loop` returns; its steps are compared.
    Returns:
        The report, equal on every rank.
    Raises:
        StrategyError: the strategy is an approximation, so there is no single-process step to compare with.
        WorkerError: a process that was started has failed; its report has been printed.
    """
    from paceline.verification.verify_on_rank import verify as verify_here

    options: dict[str, Any] = {
        "steps": steps,
        "base_dir": base_dir,
        "cluster": cluster,
        "components": components,
    }
    options |= {"observe": observe, "strict": strict, "loop": loop}
    if runs_here(processes):
        return verify_here(recipe, task, **options)
    call = call_on_processes(verify_here, recipe, task, options, processes=cast(int, processes))
    return cast("VerificationReport", call.result)


_STUDY_RECIPE = "base.toml"


def tune(
    recipe: RecipeLike,
    space: str | PathLike[str] | Mapping[str, Any],
    build: Callable[..., Any] | None = None,
    *,
    trials: int | None = None,
    workers: int = 1,
    objective: Callable[[Recipe], float] | None = None,
    out: str | PathLike[str] = "studies/tune",
    reuse: str | PathLike[str] | None = None,
    log: Callable[[str], None] | None = None,
) -> Study:
    """Search for the best settings of a recipe, as `paceline tune` does, or continue where that stopped.

    Args:
        recipe: the base recipe, or the path of its file.
        space: the path of a study file, or its tables: {"study": {...}, "stop": {...}, "space": {...}}.
        build: builds the task, in place of the one that the recipe names; it is pickled by value.
        trials: number of trials; None: the size of a grid.
        workers: trials that run at the same time, at most `proposals` of the study.
        objective: `objective(recipe) -> float`, called in a thread of this process for each trial in place of
            a training, with `[study] objective = "value"`.
        out: folder of the study.
        reuse: folder of a study whose complete runs are taken where recipes are equal.
        log: receives a line for each trial; None: nothing is printed.
    Returns:
        The study, with `best`, `trials` and `replay()`.
    Raises:
        RecipeError: recipe and space are wrong or do not go together, or `out` holds another study.
    """
    from paceline.cli import common_options
    from paceline.recipe.recipe import Recipe, to_toml
    from paceline.recipe.recipe_loading import RecipeFile
    from paceline.search import StudyRequest, plan_study, read_study_file, run_study
    from paceline.session.arguments import resolve_recipe

    folder, base_dir = Path(out), Path.cwd()
    folder.mkdir(parents=True, exist_ok=True)
    resolved, _ = resolve_recipe(recipe, build or objective, None)
    if isinstance(recipe, Recipe):
        path = folder / _STUDY_RECIPE
        path.write_text(to_toml(resolved), encoding="utf-8")
    else:
        path = Path(recipe)
        base_dir = path.resolve().parent

    file = RecipeFile(path)

    def load(overrides: Sequence[str], strategy: str | None) -> Recipe:
        return common_options.absolute_paths(file.load(overrides, strategy), base_dir)

    plan = plan_study(space) if isinstance(space, Mapping) else read_study_file(Path(space))
    request = StudyRequest(
        plan=plan,
        load=load,
        count_processes=lambda resolved: common_options.processes_for(resolved, None, 1),
        folder=folder,
        trials=trials,
        workers=workers,
        reuse=None if reuse is None else Path(reuse),
        function=objective,
        task=build,
        report=log or (lambda line: None),
    )
    return run_study(request)
