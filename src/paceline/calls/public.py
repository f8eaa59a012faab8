"""`paceline.train` and `paceline.verify`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from paceline.calls.result import with_model
from paceline.calls.start import call_on_processes, runs_here

if TYPE_CHECKING:
    from rich.console import Console

    from paceline.cluster import Cluster
    from paceline.training import Callback, Pieces, Result
    from paceline.training.given import RecipeLike, TaskLike
    from paceline.verification import Report


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
    from paceline.training import train as train_here

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
    return with_model(given.result, recipe, task, base_dir)


def verify(
    recipe: RecipeLike,
    task: TaskLike | None = None,
    *,
    processes: int | None = None,
    steps: int = 20,
    base_dir: Path | None = None,
    cluster: Cluster | None = None,
    pieces: Pieces | None = None,
    observe: Callable[[int], None] = lambda step: None,
    strict: bool = False,
    loop: Callable[[Any], None] | None = None,
) -> Report:
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
    from paceline.verification import verify as verify_here

    options: dict[str, Any] = {"steps": steps, "base_dir": base_dir, "cluster": cluster, "pieces": pieces}
    options |= {"observe": observe, "strict": strict, "loop": loop}
    if runs_here(processes):
        return verify_here(recipe, task, **options)
    given = call_on_processes(verify_here, recipe, task, options, processes=cast(int, processes))
    return cast("Report", given.result)
