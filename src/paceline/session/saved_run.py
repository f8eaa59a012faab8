"""Weights of a saved run, in one process or several: evaluate them, or predict for any samples.

`open_run` builds a session that does not train. Its layout is its own: whole in one process, whatever the
run was trained under, or partitioned as in a training. Task, number format and batch of evaluations are
those of the run. Nothing in the run folder is written.

Predictions come in blocks: replicas share the blocks, and every rank receives all predictions in the order
of the samples. What other ranks send is loaded as data only (`weights_only`), so no code in it is run.
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
from paceline.data.work import MicroBatch
from paceline.errors import CheckpointError, DataError, PacelineError, StrategyError, TaskError, format_count
from paceline.job.cluster import Cluster
from paceline.models.early_exit import EarlyExitResult, evaluate_early_exit
from paceline.models.gpt import GPT
from paceline.recipe.recipe import Recipe
from paceline.recipe.recipe_loading import load_recipe
from paceline.recipe.strategy import Strategy
from paceline.recipe.support import num_ranks, resolve_inference_strategy
from paceline.recipe.tables import BatchRecipe, EvaluateRecipe, PrecisionRecipe, RuntimeRecipe
from paceline.report.run_files import RECIPE
from paceline.session.arguments import TaskLike, resolve_run
from paceline.session.build import build_session
from paceline.session.checkpointing import checkpoint_files, restore_checkpoint
from paceline.session.evaluation import Evaluation, evaluate, share_of_blocks
from paceline.session.run_folder import run_folder_of
from paceline.session.session import Session
from paceline.session.start_rank import build_task, connected
from paceline.state.train_state import MisfitError
from paceline.task import SampleSource, Task, held_out_sets
from paceline.tasks.task_registry import SHIPPED

_BLOCKS_AT_A_TIME = 16  # of each replica; limits how many predictions are in memory


def predict_samples(session: Session, source: Any, max_samples: int = 0) -> Iterator[Any]:
    """Yield the predictions of all samples, one by one, on the host; collective: every rank must consume all.

    Args:
        source: samples; see `Task.predict`.
        max_samples: number of samples, from the first; 0: all.
    Raises:
        TaskError: the number of predictions is not that of the samples, or they cannot be sent.
        DataError: the source has several sets.
        StrategyError: the strategy splits sequences over ranks (context).
    Wire: all predictions to every rank, in addition to the forward of the layout.
    """
    names = [name for name in held_out_sets(source) if name]
    if names:
        raise DataError("the source has several sets", next_step=f"pass one of them: {', '.join(names)}")
    if session.strategy.context > 1:
        raise StrategyError(
            "predict does not support context, in which every rank has some positions of a sequence",
            next_step="use a strategy without context, or one process",
        )
    recipe = session.recipe
    samples, size = read_held_out("", source, recipe, session.task), recipe.evaluate.batch
    count = min(len(samples), max_samples or len(samples))
    blocks = [range(first, min(first + size, count)) for first in range(0, count, size)]
    at_a_time = _BLOCKS_AT_A_TIME * session.mesh.data.size
    for first in range(0, len(blocks), at_a_time):
        yield from _predict_blocks(session, samples, blocks[first : first + at_a_time])


def _predict_blocks(session: Session, samples: SampleSource, blocks: Sequence[range]) -> list[Any]:
    """Return the predictions of some blocks; collective."""
    local = [blocks[i] for i in share_of_blocks(session, len(blocks))]
    rows = _predict_on_this_rank(session, samples, local)
    if session.mesh.world.size == 1:
        return rows
    sends = session.mesh.coordinate("tensor") == 0  # its tensor peers have the same
    packed = _serialize(local[0].start, rows) if rows and sends else b""
    gathered = all_gather_bytes(packed, session.mesh.world, session.net)
    # Replicas have contiguous blocks, so the first sample of each share restores the order of the
    # source.
    shares = sorted((_deserialize(data) for data in gathered if data), key=lambda share: share[0])
    predictions = list(chain.from_iterable(rows for _, rows in shares))
    num_samples = sum(map(len, blocks))
    if len(predictions) != num_samples:
        raise StrategyError(
            f"got {format_count(len(predictions), 'prediction')} for {format_count(num_samples, 'sample')}"
            f" under '{session.strategy}'",
            next_step="predict in one process",
        )
    return predictions


def _predict_on_this_rank(session: Session, samples: SampleSource, mine: Sequence[range]) -> list[Any]:
    """Return the predictions of this rank's blocks; empty if it does not have the last layers."""
    runner, outputs = session.runner, list[Any]()

    def forward(model: nn.Module, batch: Any) -> None:
        outputs.append(predict_batch(session.task, model, batch))

    loader = build_loader(session.recipe, session.task, samples, runner.sharded_model.device)
    wanted = (MicroBatch(0, 0, np.arange(block.start, block.stop), key=0) for block in mine)
    with session.averaged(), loader.open(wanted) as stream:
        runner.forward_only(stream, forward)
    if not outputs:
        return []
    rows = (split_predictions(output, len(block)) for output, block in zip(outputs, mine, strict=True))
    return list(chain.from_iterable(rows))


def _serialize(first: int, rows: list[Any]) -> bytes:
    stream = io.BytesIO()
    torch.save((first, rows), stream)
    return stream.getvalue()


def _deserialize(share: bytes) -> tuple[int, list[Any]]:
    """Load what `_serialize` has made; raise a TaskError if that would need to run code."""
    try:
        first, rows = torch.load(io.BytesIO(share), weights_only=True)
    except UnpicklingError as error:
        raise TaskError(
            "these predictions cannot be sent between ranks",
            next_step="let predict return tensors, or lists and mappings of tensors, numbers and texts",
        ) from error
    return int(first), rows


def predict_batch(task: Task, model: torch.nn.Module, batch: Any) -> Any:
    """Return the predictions of the task, or the outputs of its model, for a batch.

    Raises:
        TaskError: the task has no `predict`, and the batch is not a tensor.
    """
    if task.predict is not None:
        return task.predict(model, batch)
    if isinstance(batch, Tensor):
        return model(batch)
    raise TaskError(
        f"cannot predict: a batch of this task is a {type(batch).__name__}, and the task has no predict"
        " function",
        next_step="pass one, for example Task(..., predict=lambda model, batch: model(batch[0]).argmax(1))",
    )


def split_predictions(predictions: Any, count: int) -> list[Any]:
    """Return the predictions of a batch as a list, one for each of its `count` samples.

    Raises:
        TaskError: there are more or fewer.
    """
    if isinstance(predictions, Mapping):
        columns = {name: split_predictions(value, count) for name, value in predictions.items()}
        return [{name: column[i] for name, column in columns.items()} for i in range(count)]
    rows = _as_rows(predictions)
    if len(rows) == count:
        return rows
    shape = list(getattr(predictions, "shape", [type(predictions).__name__]))
    raise TaskError(
        f"predict returned {shape} for a batch of {format_count(count, 'sample')}, which"
        " is not one prediction for each",
        next_step="let predict return a tensor [N, ...], a list of length N, or a dict of these",
    )


def _as_rows(predictions: Any) -> list[Any]:
    """Return the rows of a tensor, on the host, or the items of a list; empty for other types."""
    if isinstance(predictions, Tensor):
        return list(predictions.detach().cpu().unbind()) if predictions.dim() else []
    return predictions if isinstance(predictions, list) else []


_KEPT_TABLES = ("task", "options", "seed", "reproducible", "rl", "loader", "log")


@dataclass(frozen=True)
class OpenedRun:
    """Weights of a saved run in a model that is placed on the ranks.

    Args:
        session: a session that does not train.
        checkpoint: name of the checkpoint of the weights.
        max_samples: number of samples of a source to predict; 0: all.
    """

    session: Session
    checkpoint: str
    max_samples: int = 0

    @property
    def task(self) -> Task:
        """The task of the run."""
        return self.session.task

    def evaluate(self, source: Any = None) -> Evaluation:
        """Evaluate on the run's held-out data, or on other samples, or on several sets by name; collective.

        Raises:
            DataError: no samples are passed, and the task has no held-out data.
        """
        evaluation = evaluate(self.session, source)
        if evaluation is None:
            raise DataError("the task has no held-out data", next_step="pass samples to evaluate on")
        return evaluation

    def evaluate_early_exit(self, confidence: float, source: Any = None) -> EarlyExitResult:
        """Evaluate a GPT with early exits, in this process.

        Args:
            confidence: see `paceline.models.evaluate_early_exit`.
            source: token sequences, int64 [T + 1]; None: the held-out ones of the run.
        Raises:
            TaskError: the model of the run is not a GPT.
            StrategyError: there are several processes.
            DataError: there are no samples, or several sets.
        """
        model, recipe = self.session.runner.sharded_model.model, self.session.recipe
        if self.session.mesh.world.size > 1:
            raise StrategyError(
                "early exits are evaluated by one process", next_step="leave out -n and --strategy"
            )
        if not isinstance(model, GPT):
            raise TaskError(
                f"the model of the run is a {type(model).__name__}, and only a GPT predicts after each block",
                next_step="evaluate without early exits, or a run of the task byte-gpt",
            )
        sets = held_out_sets(self.task.held_out if source is None else source)
        if len(sets) != 1:
            raise DataError(
                f"expected one set of held-out samples, found {len(sets)}", next_step="pass one: --data NAME"
            )
        ((name, held_out),) = sets.items()
        samples, size = read_held_out(name, held_out, recipe, self.task), recipe.evaluate.batch
        count = min(len(samples), recipe.evaluate.max_samples or len(samples))
        device = self.session.runner.sharded_model.device
        batches = (
            torch.stack([torch.as_tensor(samples[i]) for i in range(first, min(first + size, count))])
            for first in range(0, count, size)
        )
        with self.session.averaged():
            return evaluate_early_exit(model, (batch.to(device) for batch in batches), confidence)

    def predict(self, source: Any) -> Iterator[Any]:
        """Yield the predictions of all samples on the host, in the order of the source; collective.

        Every rank must consume all of them: a rank that stops early leaves the others waiting. See
        `Task.predict`.

        Raises:
            TaskError: `predict` did not return one prediction for each sample.
            DataError: the source has several sets.
            StrategyError: the strategy splits sequences over ranks (context).
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
    """Open a saved run for evaluations and predictions inside of the block; collective on several ranks.

    Args:
        run: its folder, a checkpoint in it (`RUN/checkpoints/best`), or a folder of runs, of which the
            newest.
        task: in place of the task of its recipe, as for `train`, or "file.py:function"; for runs of a
            function in a script or a notebook.
        weights: which weights of a run that has averaged them; None: the average.
        max_samples: limit for each set; 0: none; None: that of the recipe in evaluations, none in
            predictions.
        strategy: how the weights are split over the ranks: "shard=2 zero=3", "tensor=2"; None: as in the
            training, and whole on a single rank.
        cluster: the ranks; None: this process only.
        warn: receives which checkpoints cannot be used and why.
    Raises:
        TaskError: the task of the run cannot be located.
        CheckpointError: there is no valid checkpoint, or its weights do not fit the task's model.
        StrategyError: the strategy does not fit the number of ranks.
    """
    cluster = cluster or Cluster.single()
    saved = SavedRun.find(run, strategy, max_samples, cluster.world_size)
    with connected(saved.recipe, cluster, warn) as (joined, device):
        built = task_for_inference(saved.recipe, task, saved.folder)
        opened = saved.open(built, joined, device, weights, warn)
        try:
            yield opened
        finally:
            opened.session.close()


@dataclass(frozen=True)
class SavedRun:
    """Saved run that is not opened yet.

    Args:
        recipe: for a session that does not train, with the layout of the weights.
        folder: the run folder.
        files: the folder of its checkpoints.
        name: of the wanted checkpoint; None: the newest valid one.
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
        """Read the recipe and the checkpoints of a run folder; see `open_run` for the arguments."""
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
        """Load the weights on the ranks of a connected cluster; collective; arguments as for `open_run`."""
        session = build_session(self.recipe, task, cluster, device, warn=warn, fresh=False, trains=False)
        try:
            take = partial(_read_weights_only, weights)
            used = restore_checkpoint(session, self.files, self.name, warn, take=take)
        except PacelineError:
            session.close()
            raise
        return OpenedRun(session, used, self.max_samples or 0)


def task_for_inference(recipe: Recipe, task: TaskLike | str | None, folder: Path) -> Task:
    """Return the given task, or that of the run's recipe, without an optimizer.

    Raises:
        TaskError: the recipe names a function of a script without its file.
    """
    if isinstance(task, str):
        return replace(build_task(recipe.replace(task=task), None, Path.cwd()), optimizer=None)
    if task is None and ":" not in recipe.task and recipe.task not in SHIPPED:
        raise TaskError(
            f"the run has trained a function '{recipe.task}', but its recipe does not name the file",
            where=str(folder / RECIPE),
            next_step=f"pass --task file.py:{recipe.task}, or open_run(run, {recipe.task})",
        )
    return replace(build_task(recipe, task, folder), optimizer=None)


def _inference_recipe(
    recipe: Recipe, files: StorageFolder, max_samples: int | None, layout: Strategy
) -> Recipe:
    """Return a recipe with the parts of a run's recipe that evaluations and predictions read.

    Raises:
        CheckpointError: the newest complete checkpoint cannot be read.
    """
    evaluation, catalog = recipe.evaluate, CheckpointCatalog.read(files)
    precision = recipe.precision.compute
    if catalog.whole:  # its manifest has the number format that "auto" has chosen
        manifest = open_checkpoint(files, catalog.whole[-1].name).manifest
        precision = cast(Any, manifest.origin.versions.get("precision", precision))
    # This session never trains, but its batch must have a sample for every rank. With environments, the
    # length and the batch follow from them.
    length: dict[str, Any] = {
        "steps": 1,
        "batch": BatchRecipe(size=max(recipe.batch.size, num_ranks(layout))),
    }
    return Recipe(
        **({} if recipe.rl.total_steps else length),
        strategy=layout,
        precision=PrecisionRecipe.model_validate({"compute": precision}),
        evaluate=EvaluateRecipe(
            batch=evaluation.batch,
            max_samples=evaluation.max_samples if max_samples is None else max_samples,
            validation=evaluation.validation,
        ),
        runtime=RuntimeRecipe(device=recipe.runtime.device, deadline_seconds=recipe.runtime.deadline_seconds),
        **{name: getattr(recipe, name) for name in _KEPT_TABLES},
    )


def _read_weights_only(
    which: WhichWeights | None, session: Session, stored: StoredCheckpoint
) -> Callable[[], None]:
    """Read the weights of this rank's part of the model, and no other state."""
    no_state: dict[str, Any] = {"optimizer": {}, "others": {}}
    counters = {name: stored.scalars[name] for name in ("step", "updates")}
    try:
        scalars = {**session.state.scalars(), **no_state, **counters}
        return session.state.read_from(ModelWeightsSource(stored, which), scalars)
    except MisfitError as error:
        raise CheckpointError(
            f"the weights of {stored.name} do not fit the task's model: {error.what}",
            next_step="pass the task that the run was trained with; its recipe has the options",
        ) from error


def find_samples(task: Task, name: str) -> SampleSource | None:
    """Return the samples "data", "held_out", "test" or those of a named held-out set, if there are any."""
    sets = held_out_sets(task.held_out)
    by_name = {
        "data": getattr(task.data, "stream", task.data),
        **({"held_out": task.held_out} if task.held_out is not None else {}),
        **({"test": task.test} if task.test is not None else {}),
        **sets,
    }
    return cast("SampleSource | None", by_name.get(name))
