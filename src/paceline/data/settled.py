"""What a user gives as data, made what the rest reads: a `Source`, and an order of its samples.

A stream becomes positions, a `torch.utils.data.DataLoader` is taken apart (`torch_loader.py`), held-out
streams are read into memory. Invariant: nothing that a user has said is dropped: it is taken over, agrees
with the recipe, or is refused by its name.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any, cast

from torch.utils.data import DataLoader

from paceline.data.order import Batches, Order
from paceline.data.sampled import SampledOrder
from paceline.data.stream import Positions, StreamOrder
from paceline.data.torch_loader import taken_apart
from paceline.errors import DataError, RecipeError
from paceline.task import Source, Task, is_stream, sets_of

if TYPE_CHECKING:
    from paceline.recipe import Recipe


def settled(task: Task, recipe: Recipe) -> Task:
    """The task with data that is asked for by index; a task that has it already is returned.

    Raises:
        DataError, RecipeError: something that was given has no meaning here; says what to give.
    """
    if isinstance(task.data, DataLoader):
        task = taken_apart(task, recipe)
    kept = {name: in_memory(name, source, recipe) for name, source in sets_of(task.held_out).items()}
    if any(kept[name] is not source for name, source in sets_of(task.held_out).items()):
        task = replace(task, held_out=kept.get("", kept))
    if is_stream(task.data):
        return _streamed(task, recipe)
    if task.sampler is None:
        return task
    batch = recipe.batch
    order = SampledOrder(task.sampler, len(task.data), batch.size, recipe.seed, drop_last=batch.drop_last)
    return replace(task, order=order, sampler=None)


def build_order(recipe: Recipe, task: Task) -> Batches:
    """Which samples make up every batch: the task's order, or the recipe's."""
    if task.order is not None:
        return cast(Batches, task.order)
    batch = recipe.batch
    return Order(len(task.data), batch.size, recipe.seed, shuffle=batch.shuffle, drop_last=batch.drop_last)


def in_memory(name: str, source: Any, recipe: Recipe) -> Source:
    """A held-out set that is asked for by index; of a stream as many samples as the recipe says.

    Raises:
        RecipeError: it does not say.
    """
    if not is_stream(source):
        return cast(Source, source)
    most = recipe.evaluate.max_samples
    if not most:
        raise RecipeError(
            f"the held-out data{f' {name!r}' if name else ''} is a stream, of which nobody knows the end",
            where="evaluate.max_samples",
            next_step="say how many of its first samples are kept in memory and evaluated on",
        )
    return list(islice(cast("Iterable[Any]", source), most))


def _streamed(task: Task, recipe: Recipe) -> Task:
    stream, batch = task.data, recipe.batch
    refusals = {
        "Task(sampler=...)": (task.sampler is not None, "a stream keeps its own order", "leave it out"),
        "epochs": (recipe.epochs is not None, "nobody knows the length of a stream", "set steps"),
        "loader.workers": (
            recipe.loader.workers > 0,
            "one reader follows a stream, and workers would read it once each",
            "set loader.workers = 0",
        ),
        "loader.cache_bytes": (recipe.loader.cache_bytes > 0, "no position comes twice", "leave it out"),
        "strategy": (
            recipe.strategy.servers > 0,
            "a server deals out parts of batches in any order, and a stream would be read anew for each",
            "choose a strategy without servers, or read the stream into a list",
        ),
    }
    for where, (holds, why, instead) in refusals.items():
        if holds:
            raise DataError(
                f"the data is a stream, and {where} does not go with it: {why}", next_step=instead
            )
    parts = _num_parts(stream, batch.shards)
    positions = Positions(stream, batch.size, parts, recipe.seed)
    return replace(task, data=positions, order=StreamOrder(positions))


def _num_parts(stream: Any, shards: int | None) -> int:
    """One for each shard of a batch, if the recipe fixes their number and the stream has as many parts."""
    if shards is None or not callable(getattr(stream, "shard", None)):
        return 1
    return shards if shards <= getattr(stream, "num_shards", shards) else 1
