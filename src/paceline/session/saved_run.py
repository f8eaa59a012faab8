"""What a model says of samples, as it lies on the ranks: each sample once, in the order of the source.

A run of blocks at a time; replicas take their shares of it, and what they found goes to all ranks. What comes
from another rank is data: none of it is run.

A run's weights, in one process or several: evaluated, or asked for predictions, on any samples.

The layout is its own: whole in one process, whatever the run was trained under, or cut as a training cuts.
The task, the number format and the batch of evaluations are those of the run. Nothing of the run folder is
written.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from os import PathLike
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Self, cast

import numpy as np
import torch
from torch import Tensor, nn

from paceline.checkpoint.catalog import CheckpointCatalog
from paceline.checkpoint.checkpoint_reader import StoredCheckpoint, open_checkpoint
from paceline.checkpoint.model_weights import ModelWeightsSource, WhichWeights
from paceline.checkpoint.storage import StorageFolder
from paceline.comm.group_collectives import all_gather_bytes
from paceline.data.build_feed import build_loader
from paceline.data.task_data import read_held_out
from paceline.data.work import MicroBatch, split_evenly
from paceline.errors import CheckpointError, DataError, PacelineError, StrategyError, TaskError
from paceline.job.cluster import Cluster
from paceline.recipe.recipe import EvaluateRecipe, PrecisionRecipe, Recipe, RuntimeRecipe
from paceline.recipe.recipe_loading import load_recipe
from paceline.recipe.strategy import Strategy
from paceline.recipe.support import num_ranks, resolve_inference_strategy
from paceline.recipe.tables import BatchRecipe
from paceline.report.run_files import RECIPE
from paceline.session.arguments import TaskLike, resolve_run
from paceline.session.build import build_session
from paceline.session.checkpointing import checkpoint_files, restore_checkpoint
from paceline.session.evaluation import Evaluation, evaluate
from paceline.session.joining import build_task, connected
from paceline.session.run_folder import run_folder_of
from paceline.session.session import Session
from paceline.state.train_state import MisfitError
from paceline.task import SampleSource, Task, held_out_sets
from paceline.tasks.task_registry import SHIPPED

_BLOCKS_AT_A_TIME = 16  # of each replica: predictions of so many are in memory


def predict_samples(session: Session, source: Any, max_samples: int = 0) -> Iterator[Any]:
    """The predictions of all samples, one by one, on the host; collective: every rank takes all.

    Args:
        source: samples; see `Task.predict`.
        max_samples: the first so many; 0: all.
    Raises:
        TaskError: there was not one prediction for each sample, or it is nothing that can be sent.
        DataError: these are several sets.
        StrategyError: ranks have some positions of a sequence only.
    Wire: what is predicted, to every rank; beside what the layout sends in a forward.
    """
    names = [name for name in held_out_sets(source) if name]
    if names:
        raise DataError("these are several sets", next_step=f"name one of them: {', '.join(names)}")
    if session.strategy.context > 1:
        raise StrategyError(
            "ranks of a context have some positions of a sequence, and a prediction is of all",
            next_step="predict under a strategy without context, or in one process",
        )
    samples, size = read_held_out("", source, session.recipe), session.recipe.evaluate.batch
    count = min(len(samples), max_samples or len(samples))
    blocks = [range(first, min(first + size, count)) for first in range(0, count, size)]
    at_a_time = _BLOCKS_AT_A_TIME * session.mesh.data.size
    for first in range(0, len(blocks), at_a_time):
        yield from _predict_blocks(session, samples, blocks[first : first + at_a_time])


def _predict_blocks(session: Session, samples: SampleSource, blocks: Sequence[range]) -> list[Any]:
    """The predictions of some blocks; collective."""
    data = session.mesh.data
    mine = [blocks[i] for i in split_evenly(len(blocks), data.size, data.rank)]
    rows = _predict_on_this_rank(session, samples, mine)
    if session.mesh.world.size == 1:
        return rows
    tells = session.mesh.place("tensor") == 0  # its peers have found the same
    packed = _serialize(mine[0].start, rows) if rows and tells else b""
    said = all_gather_bytes(packed, session.mesh.world, session.net)
    shares = sorted((_deserialize(one) for one in said if one), key=_first_sample)
    together = list(chain.from_iterable(rows for _, rows in shares))
    wanted = sum(map(len, blocks))
    if len(together) != wanted:
        raise StrategyError(
            f"{len(together)} predictions came together of {wanted} samples under '{session.strategy}'",
            next_step="predict in one process",
        )
    return together


def _predict_on_this_rank(session: Session, samples: SampleSource, mine: Sequence[range]) -> list[Any]:
    """What this rank finds; nothing where it has not the end of the model."""
    runner, found = session.runner, list[Any]()

    def ask(model: nn.Module, batch: Any) -> None:
        found.append(predict_batch(session.task, model, batch))

    loader = build_loader(session.recipe, session.task, samples, runner.sharded_model.device)
    wanted = (MicroBatch(0, 0, np.arange(block.start, block.stop), key=0) for block in mine)
    with session.averaged(), loader.open(wanted) as stream:
        runner.forward_only(stream, ask)
    if not found:
        return []
    rows = (split_predictions(one, len(block)) for one, block in zip(found, mine, strict=True))
    return list(chain.from_iterable(rows))


def _first_sample(share: tuple[int, list[Any]]) -> int:
    return share[0]


def _serialize(first: int, rows: list[Any]) -> bytes:
    stream = io.BytesIO()
    torch.save((first, rows), stream)
    return stream.getvalue()


def _deserialize(share: bytes) -> tuple[int, list[Any]]:
    """Raises: TaskError: there is something in it that only code could make again."""
    try:
        first, rows = torch.load(io.BytesIO(share), weights_only=True)
    except UnpicklingError as error:
        raise TaskError(
            "predictions travel between ranks, and these cannot",
            next_step="let predict return tensors, or lists and mappings of tensors, numbers and texts",
        ) from error
    return int(first), rows


def predict_batch(task: Task, model: torch.nn.Module, batch: Any) -> Any:
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


def split_predictions(found: Any, count: int) -> list[Any]:
    """The predictions of a batch, one for each of its `count` samples.

    Raises:
        TaskError: there are more or fewer.
    """
    if isinstance(found, Mapping):
        columns = {name: split_predictions(value, count) for name, value in found.items()}
        return [{name: column[i] for name, column in columns.items()} for i in range(count)]
    rows = _as_rows(found)
    if len(rows) == count:
        return rows
    shape = list(getattr(found, "shape", [type(found).__name__]))
    raise TaskError(
        f"a batch of {count} samples has the prediction {shape}, which is not one for each of them",
        next_step="let predict return a tensor [N, ...], a list of N, or a mapping of such by name",
    )


def _as_rows(found: Any) -> list[Any]:
    """What a tensor, on the host, or a list holds; nothing of anything else."""
    if isinstance(found, Tensor):
        return list(found.detach().cpu().unbind()) if found.dim() else []
    return found if isinstance(found, list) else []


_KEPT_TABLES = ("task", "options", "seed", "reproducible", "loader", "log")


@dataclass(frozen=True)
class OpenedRun:
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
        return predict_samples(self.session, source, self.max_samples)


@contextmanager
def open_run(
    run: str | PathLike[str],
    task: TaskLike | str | None = None,
    *,
    weights: WhichWeights | None = None,
    max_samples: int | None = None,
    strategy: str | None = None,
    cluster: Cluster | None = None,
    warn: Callable[[str], None] = lambda text: None,
) -> Iterator[OpenedRun]:
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
    found = SavedRun.find(run, strategy, max_samples, cluster.world_size)
    with connected(found.recipe, cluster, warn) as (joined, device):
        built = task_for_inference(found.recipe, task, found.folder)
        opened = found.open(built, joined, device, weights, warn)
        try:
            yield opened
        finally:
            opened.session.close()


@dataclass(frozen=True)
class SavedRun:
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
    files: StorageFolder
    name: str | None
    max_samples: int | None

    @classmethod
    def find(
        cls, run: str | PathLike[str], strategy: str | None, max_samples: int | None, num_processes: int
    ) -> Self:
        """Look at its folder; see `open_run`."""
        folder = run_folder_of(path := cast(Path, resolve_run(run)))
        recipe = load_recipe(folder / RECIPE)
        name = None if path.resolve() == folder.resolve() else path.name
        files, layout = (
            checkpoint_files(recipe, folder),
            resolve_inference_strategy(recipe.strategy, strategy, num_processes),
        )
        return cls(_inference_recipe(recipe, files, max_samples, layout), folder, files, name, max_samples)

    def open(
        self,
        task: Task,
        cluster: Cluster,
        device: torch.device,
        weights: WhichWeights | None = None,
        warn: Callable[[str], None] = lambda text: None,
    ) -> OpenedRun:
        """The weights as they lie on the ranks of a cluster that is connected; collective. See `open_run`."""
        session = build_session(self.recipe, task, cluster, device, warn=warn, fresh=False)
        try:
            take = partial(_read_weights_only, weights)
            used = restore_checkpoint(session, self.files, self.name, warn, take=take)
        except PacelineError:
            session.close()
            raise
        return OpenedRun(session, used, self.max_samples or 0)


def task_for_inference(recipe: Recipe, task: TaskLike | str | None, folder: Path) -> Task:
    """The task that is given, named, or of the recipe of the run in this folder; nothing trains it.

    Raises:
        TaskError: the recipe names a function of a script, and not where it is.
    """
    if isinstance(task, str):
        return replace(build_task(recipe.replace(task=task), None, Path.cwd()), optimizer=None)
    if task is None and ":" not in recipe.task and recipe.task not in SHIPPED:
        raise TaskError(
            f"the run is of a function '{recipe.task}', and its recipe does not say where that is",
            where=str(folder / RECIPE),
            next_step=f"--task file.py:{recipe.task}, or open_run(run, {recipe.task})",
        )
    return replace(build_task(recipe, task, folder), optimizer=None)


def _inference_recipe(
    recipe: Recipe, files: StorageFolder, max_samples: int | None, layout: Strategy
) -> Recipe:
    """What of a run's recipe is read where nothing is trained.

    Raises:
        CheckpointError: the newest that is whole cannot be read.
    """
    evaluation, shelf = recipe.evaluate, CheckpointCatalog.look(files)
    precision = recipe.precision.compute
    if shelf.whole:  # what "auto" chose
        manifest = open_checkpoint(files, shelf.whole[-1].name).manifest
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
        **{name: getattr(recipe, name) for name in _KEPT_TABLES},
    )


def _read_weights_only(
    which: WhichWeights | None, session: Session, found: StoredCheckpoint
) -> Callable[[], None]:
    """Read what this rank has of the model; nothing else of a state is there."""
    nothing: dict[str, Any] = {"optimizer": {}, "others": {}}
    taken = {name: found.scalars[name] for name in ("step", "updates")}
    try:
        scalars = {**session.state.scalars(), **nothing, **taken}
        return session.state.read_from(ModelWeightsSource(found, which), scalars)
    except MisfitError as error:
        raise CheckpointError(
            f"the weights of {found.name} are not those of the task's model: {error.what}",
            next_step="name the task that the run was trained with; its recipe holds the options",
        ) from error


def find_samples(task: Task, name: str) -> SampleSource | None:
    """A set of the task by its name: "data", "held_out", or one of several held-out sets; None: none."""
    sets = held_out_sets(task.held_out)
    own = {
        "data": getattr(task.data, "stream", task.data),
        **({"held_out": task.held_out} if task.held_out is not None else {}),
        **sets,
    }
    return cast("SampleSource | None", own.get(name))
