"""A run's weights, in one process or several: evaluated, or asked for predictions, on any samples.

The layout is its own: whole in one process, whatever the run was trained under, or cut as a training cuts.
The task, the number format and the batch of evaluations are those of the run. Nothing of the run folder is
written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, Self, cast

import torch

from paceline.checkpoint import Files, Shelf, Stored, Weights, WeightsAlone, stored_at
from paceline.cluster import Cluster
from paceline.errors import CheckpointError, DataError, PacelineError, TaskError
from paceline.recipe import EvaluateRecipe, Recipe, Strategy, load_recipe
from paceline.recipe.at_rest import layout_at_rest
from paceline.recipe.learning import BatchRecipe
from paceline.recipe.model import PrecisionRecipe, RuntimeRecipe
from paceline.recipe.support import num_ranks
from paceline.report.folder import RECIPE
from paceline.state import MisfitError
from paceline.task import Source, Task, sets_of
from paceline.tasks import SHIPPED
from paceline.training.build import build_session
from paceline.training.evaluation import Evaluation, evaluate
from paceline.training.given import TaskLike, given_run
from paceline.training.joining import connected, obtain_task
from paceline.training.predictions import predictions
from paceline.training.run_folder import run_of
from paceline.training.saving import files_of, restore
from paceline.training.session import Session

_KEPT = ("task", "options", "seed", "reproducible", "loader", "log")


@dataclass(frozen=True)
class OpenRun:
    """A run's weights in a model, as they lie on the ranks.

    Args:
        session: which does not train.
        checkpoint: name of the one that the weights are from.
        max_samples: of a source that is predicted; 0: all.
    """

    session: Session
    checkpoint: str
    max_samples: int = 0

    @property
    def task(self) -> Task:
        """The run's."""
        return self.session.task

    def evaluate(self, source: Any = None) -> Evaluation:
        """Evaluate on the run's held-out data, or on other samples, or on several sets by name; collective.

        Raises:
            DataError: nothing is given, and the task has no held-out data.
        """
        found = evaluate(self.session, source)
        if found is None:
            raise DataError("the task has no held-out data", next_step="name samples to evaluate on")
        return found

    def predict(self, source: Any) -> Iterator[Any]:
        """The predictions of all samples, one by one, on the host, in the order of the source; collective.

        Every rank takes all of them: who stops between two has the others wait. See `Task.predict`.

        Raises:
            TaskError: it gave something else than one prediction for each sample.
            DataError: these are several sets.
            StrategyError: the strategy splits sequences, so no rank has all of a prediction.
        """
        return predictions(self.session, source, self.max_samples)


@contextmanager
def open_run(
    run: str | PathLike[str],
    task: TaskLike | str | None = None,
    *,
    weights: Weights | None = None,
    max_samples: int | None = None,
    strategy: str | None = None,
    cluster: Cluster | None = None,
    warn: Callable[[str], None] = lambda text: None,
) -> Iterator[OpenRun]:
    """A run, to be evaluated or asked for predictions inside of the block; collective on several ranks.

    Args:
        run: its folder, a checkpoint inside it (`RUN/checkpoints/best`), or a folder of runs: the newest.
        task: in place of the one that its recipe names, as `train` takes one, or "file.py:function": for runs
            of a function of a script or a notebook.
        weights: of a run with an average: which; None: the average.
        max_samples: of a set; 0: all; None: as the recipe says in evaluations, and all in predictions.
        strategy: how the weights are split over the ranks: "shard=2 zero=3", "tensor=2"; None: as in the
            training, and all of them where there is one rank.
        cluster: the ranks; None: this process alone.
        warn: is told which checkpoints cannot be used and why.
    Raises:
        TaskError: nobody says where its task is.
        CheckpointError: there is no valid one, or its weights are not those of the task's model.
        StrategyError: the weights cannot lie so on so many ranks.
    """
    cluster = cluster or Cluster.single()
    found = Resting.find(run, strategy, max_samples, cluster.world_size)
    with connected(found.recipe, cluster, warn) as (joined, device):
        built = task_at_rest(found.recipe, task, found.folder)
        opened = found.open(built, joined, device, weights, warn)
        try:
            yield opened
        finally:
            opened.session.close()


@dataclass(frozen=True)
class Resting:
    """A run that is not opened yet.

    Args:
        recipe: what is read of the run's, under the layout in which the weights will lie.
        folder: of the run.
        files: of its checkpoints.
        name: of the one that is wanted; None: the newest that is valid.
        max_samples: see `open_run`.
    """

    recipe: Recipe
    folder: Path
    files: Files
    name: str | None
    max_samples: int | None

    @classmethod
    def find(
        cls, run: str | PathLike[str], strategy: str | None, max_samples: int | None, num_processes: int
    ) -> Self:
        """Look at its folder; see `open_run`."""
        folder = run_of(path := cast(Path, given_run(run)))
        recipe = load_recipe(folder / RECIPE)
        name = None if path.resolve() == folder.resolve() else path.name
        files, layout = files_of(recipe, folder), layout_at_rest(recipe.strategy, strategy, num_processes)
        return cls(_at_rest(recipe, files, max_samples, layout), folder, files, name, max_samples)

    def open(
        self,
        task: Task,
        cluster: Cluster,
        device: torch.device,
        weights: Weights | None = None,
        warn: Callable[[str], None] = lambda text: None,
    ) -> OpenRun:
        """The weights as they lie on the ranks of a cluster that is connected; collective. See `open_run`."""
        session = build_session(self.recipe, task, cluster, device, warn=warn, fresh=False)
        try:
            take = partial(_weights_alone, weights)
            used = restore(session, self.files, self.name, warn, take=take)
        except PacelineError:
            session.close()
            raise
        return OpenRun(session, used, self.max_samples or 0)


def task_at_rest(recipe: Recipe, task: TaskLike | str | None, folder: Path) -> Task:
    """The task that is given, named, or of the recipe of the run in this folder; nothing trains it.

    Raises:
        TaskError: the recipe names a function of a script, and not where it is.
    """
    if isinstance(task, str):
        return replace(obtain_task(recipe.replace(task=task), None, Path.cwd()), optimizer=None)
    if task is None and ":" not in recipe.task and recipe.task not in SHIPPED:
        raise TaskError(
            f"the run is of a function '{recipe.task}', and its recipe does not say where that is",
            where=str(folder / RECIPE),
            next_step=f"--task file.py:{recipe.task}, or open_run(run, {recipe.task})",
        )
    return replace(obtain_task(recipe, task, folder), optimizer=None)


def _at_rest(recipe: Recipe, files: Files, max_samples: int | None, layout: Strategy) -> Recipe:
    """What of a run's recipe is read where nothing is trained.

    Raises:
        CheckpointError: the newest that is whole cannot be read.
    """
    evaluation, shelf = recipe.evaluate, Shelf.look(files)
    precision = recipe.precision.compute
    if shelf.whole:  # what "auto" chose
        manifest = stored_at(files, shelf.whole[-1].name).manifest
        precision = cast(Any, manifest.origin.versions.get("precision", precision))
    return Recipe(
        steps=1,
        strategy=layout,
        batch=BatchRecipe(size=max(recipe.batch.size, num_ranks(layout))),
        precision=PrecisionRecipe.model_validate({"compute": precision}),
        evaluate=EvaluateRecipe(
            batch=evaluation.batch,
            max_samples=evaluation.max_samples if max_samples is None else max_samples,
        ),
        runtime=RuntimeRecipe(device=recipe.runtime.device, deadline_seconds=recipe.runtime.deadline_seconds),
        **{name: getattr(recipe, name) for name in _KEPT},
    )


def _weights_alone(which: Weights | None, session: Session, found: Stored) -> Callable[[], None]:
    """Read what this rank has of the model; nothing else of a state is there."""
    nothing: dict[str, Any] = {"optimizer": {}, "others": {}}
    taken = {name: found.scalars[name] for name in ("step", "updates")}
    try:
        scalars = {**session.state.scalars(), **nothing, **taken}
        return session.state.read_from(WeightsAlone(found, which), scalars)
    except MisfitError as error:
        raise CheckpointError(
            f"the weights of {found.name} are not those of the task's model: {error.what}",
            next_step="name the task that the run was trained with; its recipe holds the options",
        ) from error


def samples_of(task: Task, name: str) -> Source | None:
    """A set of the task by its name: "data", "held_out", or one of several held-out sets; None: none."""
    sets = sets_of(task.held_out)
    own = {
        "data": getattr(task.data, "stream", task.data),
        **({"held_out": task.held_out} if task.held_out is not None else {}),
        **sets,
    }
    return cast("Source | None", own.get(name))
