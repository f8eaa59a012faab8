"""A run's weights in one process: evaluated, or asked for predictions, on any samples.

The weights are whole, whatever layout the run was trained under; the task, the number format and the batch of
evaluations are those of the run. Nothing of the run folder is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from paceline.checkpoint import Loaded, Weights, find_checkpoint, weights_of, with_tied_names
from paceline.cluster import Cluster
from paceline.data import MicroBatch, in_memory
from paceline.errors import CheckpointError, DataError, TaskError
from paceline.recipe import EvaluateRecipe, Recipe, load_recipe
from paceline.recipe.learning import BatchRecipe
from paceline.recipe.model import PrecisionRecipe, RuntimeRecipe
from paceline.report.folder import RECIPE
from paceline.task import Source, Task, sets_of
from paceline.tasks import SHIPPED
from paceline.training.build import build_loader, build_session
from paceline.training.evaluation import Evaluation, evaluate
from paceline.training.given import TaskLike, given_run
from paceline.training.joining import connected, obtain_task
from paceline.training.run_folder import run_of
from paceline.training.saving import files_of
from paceline.training.session import Session

_KEPT = ("task", "options", "seed", "reproducible", "loader", "log")


@dataclass(frozen=True)
class OpenRun:
    """A run's weights in a model, on this process.

    Args:
        session: of one process, which does not train.
        checkpoint: name of the one that the weights are from.
    """

    session: Session
    checkpoint: str

    @property
    def task(self) -> Task:
        """The run's."""
        return self.session.task

    def evaluate(self, source: Any = None) -> Evaluation:
        """Evaluate on the run's held-out data, or on other samples, or on several sets by name.

        Raises:
            DataError: nothing is given, and the task has no held-out data.
        """
        found = evaluate(self.session, source)
        if found is None:
            raise DataError("the task has no held-out data", next_step="name samples to evaluate on")
        return found

    def predict(self, source: Any) -> Iterator[Any]:
        """The predictions of all samples, one by one, on the host; see `Task.predict`.

        Raises:
            TaskError: it gave something else than one prediction for each sample.
            DataError: these are several sets.
        """
        names = [name for name in sets_of(source) if name]
        if names:
            raise DataError("these are several sets", next_step=f"name one of them: {', '.join(names)}")
        session, samples = self.session, in_memory("", source, self.session.recipe)
        placed, model = session.placed, session.placed.holding.model
        loader = build_loader(session.recipe, session.task, samples, placed.holding.device)
        with loader.open(_blocks(len(samples), session.recipe.evaluate.batch)) as stream:
            for loaded in stream:
                model.eval()
                with torch.no_grad(), cast(Any, placed).precision.autocast():
                    found = predicted(session.task, model, loaded.batch)
                yield from rows_of(found, len(loaded.micro_batch.indices))


def _blocks(num_samples: int, size: int) -> Iterator[MicroBatch]:
    for first in range(0, num_samples, size):
        yield MicroBatch(0, 0, np.arange(first, min(first + size, num_samples)), key=0)


@contextmanager
def open_run(
    run: str | PathLike[str],
    task: TaskLike | str | None = None,
    *,
    weights: Weights | None = None,
    max_samples: int | None = None,
    warn: Callable[[str], None] = lambda text: None,
) -> Iterator[OpenRun]:
    """A run, to be evaluated or asked for predictions inside of the block.

    Args:
        run: its folder, a checkpoint inside it (`RUN/checkpoints/best`), or a folder of runs: the newest.
        task: in place of the one that its recipe names, as `train` takes one, or "file.py:function": for runs
            of a function of a script or a notebook.
        weights: of a run with an average: which; None: the average.
        max_samples: of a set; 0: all; None: as the recipe says.
        warn: is told which checkpoints cannot be used and why.
    Raises:
        TaskError: nobody says where its task is.
        CheckpointError: there is no valid one, or its weights are not those of the task's model.
    """
    path = cast(Path, given_run(run))
    folder = run_of(path)
    recipe = load_recipe(folder / RECIPE)
    name = None if path.resolve() == folder.resolve() else path.name
    found = find_checkpoint(files_of(recipe, folder), warn, name)
    alone = _alone(recipe, found, max_samples)
    with connected(alone, Cluster.single()) as (cluster, device):
        built = _task_of(alone, task, folder)
        session = build_session(alone, replace(built, optimizer=None), cluster, device, fresh=False)
        try:
            _fill(session, found, weights)
            yield OpenRun(session, found.name)
        finally:
            session.close()


def _task_of(recipe: Recipe, task: TaskLike | str | None, folder: Path) -> Task:
    """The task that is given, or named, or that the recipe of the run in this folder names.

    Raises:
        TaskError: the recipe names a function of a script, and not where it is.
    """
    if isinstance(task, str):
        return obtain_task(recipe.replace(task=task), None, Path.cwd())
    if task is None and ":" not in recipe.task and recipe.task not in SHIPPED:
        raise TaskError(
            f"the run is of a function '{recipe.task}', and its recipe does not say where that is",
            where=str(folder / RECIPE),
            next_step=f"--task file.py:{recipe.task}, or open_run(run, {recipe.task})",
        )
    return obtain_task(recipe, task, folder)


def _alone(recipe: Recipe, found: Loaded, max_samples: int | None) -> Recipe:
    """What of a run's recipe one process reads that does not train."""
    evaluation = recipe.evaluate
    precision = found.manifest.origin.versions.get("precision", recipe.precision.compute)
    return Recipe(
        steps=1,
        batch=BatchRecipe(size=recipe.batch.size),
        precision=PrecisionRecipe.model_validate({"compute": precision}),
        evaluate=EvaluateRecipe(
            batch=evaluation.batch,
            max_samples=evaluation.max_samples if max_samples is None else max_samples,
        ),
        runtime=RuntimeRecipe(device=recipe.runtime.device, deadline_seconds=recipe.runtime.deadline_seconds),
        **{name: getattr(recipe, name) for name in _KEPT},
    )


def _fill(session: Session, found: Loaded, weights: Weights | None) -> None:
    """Put the weights of a checkpoint into the model."""
    model = session.placed.holding.model
    try:
        model.load_state_dict(with_tied_names(weights_of(found, weights), found))
    except RuntimeError as error:
        raise CheckpointError(
            f"the weights of {found.name} are not those of the task's model: {error}",
            next_step="name the task that the run was trained with; its recipe holds the options",
        ) from error
    session.state.step = found.manifest.step


def predicted(task: Task, model: torch.nn.Module, batch: Any) -> Any:
    """What the task, or its model, says of a batch.

    Raises:
        TaskError: the task does not say how, and the batch is no tensor.
    """
    if task.predict is not None:
        return task.predict(model, batch)
    if isinstance(batch, Tensor):
        return model(batch)
    raise TaskError(
        f"a batch of this task is a {type(batch).__name__}, and nothing says what of it the model is asked",
        next_step="Task(..., predict=lambda model, batch: model(batch[0]).argmax(1)), for example",
    )


def rows_of(found: Any, count: int) -> list[Any]:
    """The predictions of a batch, one for each of its `count` samples.

    Raises:
        TaskError: there are more or fewer.
    """
    if isinstance(found, Mapping):
        columns = {name: rows_of(value, count) for name, value in found.items()}
        return [{name: column[i] for name, column in columns.items()} for i in range(count)]
    rows = _unbound(found)
    if len(rows) == count:
        return rows
    shape = list(getattr(found, "shape", [type(found).__name__]))
    raise TaskError(
        f"a batch of {count} samples has the prediction {shape}, which is not one for each of them",
        next_step="let predict return a tensor [N, ...], a list of N, or a mapping of such by name",
    )


def _unbound(found: Any) -> list[Any]:
    """What a tensor, on the host, or a list holds; nothing of anything else."""
    if isinstance(found, Tensor):
        return list(found.detach().cpu().unbind()) if found.dim() else []
    return found if isinstance(found, list) else []


def samples_of(task: Task, name: str) -> Source | None:
    """A set of the task by its name: "data", "held_out", or one of several held-out sets; None: none."""
    sets = sets_of(task.held_out)
    own = {
        "data": getattr(task.data, "stream", task.data),
        **({"held_out": task.held_out} if task.held_out is not None else {}),
        **sets,
    }
    return cast("Source | None", own.get(name))
