"""The data of a task, prepared for a run: `DataLoader`s are unpacked, streams and samplers get an order.

Invariant: after `prepare_data` a task has map-style data and an order of samples; settings of a
`DataLoader` that contradict the recipe are an error that names both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    default_collate,
)

from paceline.data.sample_order import BatchOrder, KeyedOrder, KeyedPermutation, SamplerOrder
from paceline.data.stream import StreamOrder, StreamPositions
from paceline.errors import DataError, RecipeError
from paceline.state.keys import key
from paceline.task import SampleSource, Task, held_out_sets, is_stream, require_samples

if TYPE_CHECKING:
    from paceline.recipe.recipe import Recipe

_MIN_SPLIT_SAMPLES = 2


def unpack_data_loader(task: Task, recipe: Recipe) -> Task:
    """Return the task with the data set, the collate function and the sampler of its DataLoader.

    Raises:
        DataError: an argument of the DataLoader contradicts the recipe, or is not supported.
    """
    loader: DataLoader[Any] = task.data
    require_samples("data", loader.dataset)
    wrong = [*_differences_from_recipe(loader, recipe), *_unsupported_arguments(loader, task)]
    if wrong:
        raise DataError(
            "the DataLoader does not go with the recipe: " + "; ".join(wrong),
            where="Task(data=DataLoader(...))",
            next_step="give the data set itself, Task(data=dataset, collate=..., sampler=...), and the rest"
            " in the recipe's [batch] and [loader]",
        )
    loader_collate, is_default = loader.collate_fn, loader.collate_fn is default_collate
    collate = task.collate if is_default or loader.batch_size is None else loader_collate
    return replace(task, data=loader.dataset, collate=collate, sampler=_sampler_of(loader) or task.sampler)


def _sampler_of(loader: DataLoader[Any]) -> Any:
    """Return the sampler if it orders samples in another way than `shuffle` does; None: it does not."""
    if is_stream(loader.dataset) or type(loader.sampler) is SequentialSampler or _shuffles(loader):
        return None
    return loader.sampler


def _shuffles(loader: DataLoader[Any]) -> bool:
    sampler = loader.sampler
    return type(sampler) is RandomSampler and not sampler.replacement and sampler._num_samples is None


def _differences_from_recipe(loader: DataLoader[Any], recipe: Recipe) -> Iterator[str]:
    """Yield a sentence for each setting that differs between the DataLoader and the recipe."""
    batch = recipe.batch
    settings = {
        "batch_size": (loader.batch_size, "batch.size", batch.size),
        "drop_last": (loader.drop_last, "batch.drop_last", batch.drop_last),
        **_worker_settings(loader, recipe),
    }
    if not is_stream(loader.dataset) and _sampler_of(loader) is None:
        settings["shuffle"] = (_shuffles(loader), "batch.shuffle", batch.shuffle)
    yield from _describe_differences(settings)


_Settings = dict[str, tuple[Any, str, Any]]
"""By argument of a DataLoader: its value, the key of the recipe, and the recipe's value."""


def _worker_settings(loader: DataLoader[Any], recipe: Recipe) -> _Settings:
    settings: _Settings = {"num_workers": (loader.num_workers, "loader.workers", recipe.loader.workers)}
    if loader.num_workers:
        settings["prefetch_factor"] = (loader.prefetch_factor, "loader.prefetch", recipe.loader.prefetch)
    return settings


def _describe_differences(settings: _Settings) -> Iterator[str]:
    for name, (loader_value, recipe_key, value) in settings.items():
        if loader_value != value:
            yield f"{name} is {loader_value}, and {recipe_key} = {value}"


def _unsupported_arguments(loader: DataLoader[Any], task: Task) -> Iterator[str]:
    """Yield a sentence for each argument of the DataLoader that would have no effect."""
    yield from _unread_arguments(loader)
    if task.collate is not None and loader.collate_fn is not default_collate:
        yield "collate_fn: the task has a collate function too"
    if task.sampler is not None and _sampler_of(loader) is not None:
        yield "sampler: the task has a sampler too"


def _unread_arguments(loader: DataLoader[Any]) -> Iterator[str]:
    if not is_stream(loader.dataset) and type(loader.batch_sampler) not in (BatchSampler, type(None)):
        yield f"batch_sampler ({type(loader.batch_sampler).__name__}): batches are cut by batch.size"
    unread = {
        "generator": "the run's seed orders the samples",
        "worker_init_fn": "what a worker draws is seeded by the micro-batch",
        "multiprocessing_context": "loader processes are forked",
    }
    for name, why in unread.items():
        if getattr(loader, name) is not None:
            yield f"{name}: {why}"
    if loader.timeout:
        yield "timeout: a batch may take runtime.deadline_seconds"


class CollatedSamples:
    """Map-style samples with a collate function of their own, in place of the task's.

    Args:
        samples: map-style data.
        collate: list of samples to batch.
    """

    def __init__(self, samples: SampleSource, collate: Callable[[list[Any]], Any]) -> None:
        self.samples, self.collate = samples, collate
        fetch_many = getattr(samples, "__getitems__", None)
        if callable(fetch_many):
            self.__getitems__ = fetch_many

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


def collate_of(task: Task, source: Any) -> Callable[[list[Any]], Any] | None:
    """Return the collate function of a source: its own, or the task's; None: PyTorch's default."""
    return source.collate if isinstance(source, CollatedSamples) else task.collate


def unpack_held_out(name: str, loader: DataLoader[Any], recipe: Recipe, task: Task) -> Any:
    """Return the samples of a held-out DataLoader, with its collate function.

    Args:
        task: as the user built it: its collate function is used if the loader has the default one.
    Raises:
        DataError: an argument of the DataLoader contradicts the recipe, or is not supported.
    """
    require_samples("held_out", loader.dataset)
    sampler = _sampler_of(loader)
    is_subset = type(sampler) is SubsetRandomSampler
    wrong = [*_describe_differences(_held_out_settings(loader, recipe)), *_unread_arguments(loader)]
    if sampler is not None and not is_subset:
        wrong.append(f"sampler ({type(sampler).__name__}): every held-out sample is used once")
    if wrong:
        raise DataError(
            "the held-out DataLoader does not go with the recipe: " + "; ".join(wrong),
            where=f"Task(held_out={{'{name}': DataLoader(...)}})"
            if name
            else "Task(held_out=DataLoader(...))",
            next_step="give the data set itself, Task(held_out=dataset), or one of its subsets, and the rest"
            " in the recipe's [evaluate] and [loader]",
        )
    # The order of the samples does not change a mean, so a sampler of a subset only selects.
    samples = Subset(loader.dataset, [*cast(Any, sampler).indices]) if is_subset else loader.dataset
    is_default = loader.collate_fn is default_collate or loader.batch_size is None
    collate = (task.collate or default_collate) if is_default else loader.collate_fn
    return CollatedSamples(read_held_out(name, samples, recipe, task), collate)


def _held_out_settings(loader: DataLoader[Any], recipe: Recipe) -> _Settings:
    evaluate = recipe.evaluate
    settings: _Settings = {
        "batch_size": (loader.batch_size, "evaluate.batch", evaluate.batch),
        **_worker_settings(loader, recipe),
    }
    if loader.drop_last:
        settings["drop_last"] = (True, "no key that leaves samples out of an evaluation; drop_last", False)
    if not is_stream(loader.dataset) and _shuffles(loader) and evaluate.max_samples:
        settings["shuffle"] = (True, "evaluate.max_samples takes the first samples; shuffle", False)
    return settings


class SplitSamples(Subset):
    """One side of the keyed split of the training samples that `evaluate.validation` makes."""


def split_validation(task: Task, share: float, recipe: Recipe) -> Task:
    """Return the task with a part of its training samples as `held_out`, and its held-out ones as `test`.

    The split is a function of the number of samples and the share alone: every seed and every setting that
    is searched has the same one. It is by index, so samples that are copies of each other can be on both
    sides.

    Args:
        share: of the samples that are held out, rounded to whole samples, at least one on each side.
    Raises:
        DataError: the data has no fixed length, an order of its own, or fewer than two samples.
    """
    if isinstance(task.data, DataLoader):
        task = unpack_data_loader(task, recipe)
    refusals = {
        "it is a stream, whose samples have no index": is_stream(task.data),
        "it belongs to clients, and the split would be another one for each": bool(task.clients),
        "a sampler or order of its own chooses among all samples": not (task.sampler is None is task.order),
    }
    refusals["it has fewer than two samples"] = (
        not any(refusals.values()) and len(task.data) < _MIN_SPLIT_SAMPLES
    )
    for why, holds in refusals.items():
        if holds:
            raise DataError(
                f"the training data cannot be split for validation: {why}",
                where="evaluate.validation",
                next_step="leave evaluate.validation out; Task(held_out=...) can have validation samples",
            )
    num_samples = len(task.data)
    num_held_out = min(max(1, round(share * num_samples)), num_samples - 1)
    order = KeyedPermutation(num_samples, key("validation"))[np.arange(num_samples)]
    held_out, rest = np.sort(order[:num_held_out]).tolist(), np.sort(order[num_held_out:]).tolist()
    return replace(
        task,
        data=SplitSamples(task.data, rest),
        held_out=SplitSamples(task.data, held_out),
        test=task.held_out,
    )


def prepare_data(task: Task, recipe: Recipe) -> Task:
    """Return the task with map-style data; a task that has it already is returned unchanged.

    Raises:
        DataError, RecipeError: an argument of the task is not supported; says which to use instead.
    """
    if task.for_recipe is not None:
        task = task.for_recipe(task, recipe)
    elif recipe.rl.total_steps:
        raise RecipeError(
            f"the task {recipe.task!r} has no environments",
            where="rl.total_steps",
            next_step='return paceline.rl.Task(...) from the task, set task = "rl", or remove [rl]',
        )
    share = recipe.evaluate.validation
    # before anything reads the held-out samples, which become the test set
    if share is not None and not isinstance(task.data, SplitSamples):
        task = split_validation(task, share, recipe)
    # First the held-out sets: their loaders have collate functions apart from that of the training data.
    held_out = {
        name: read_held_out(name, source, recipe, task)
        for name, source in held_out_sets(task.held_out).items()
    }
    if isinstance(task.data, DataLoader):
        task = unpack_data_loader(task, recipe)
    # Replaced only if a set has changed, so that an unchanged task stays the same object.
    if any(held_out[name] is not source for name, source in held_out_sets(task.held_out).items()):
        task = replace(task, held_out=held_out.get("", held_out))
    if is_stream(task.data):
        return _prepare_stream(task, recipe)
    if task.sampler is None:
        return task
    batch = recipe.batch
    order = SamplerOrder(task.sampler, len(task.data), batch.size, recipe.seed, drop_last=batch.drop_last)
    return replace(task, order=order, sampler=None)


def build_order(recipe: Recipe, task: Task) -> BatchOrder:
    """Return the order of samples: the task's if it has one, else the recipe's."""
    if task.order is not None:
        return cast(BatchOrder, task.order)
    batch = recipe.batch
    return KeyedOrder(
        len(task.data), batch.size, recipe.seed, shuffle=batch.shuffle, drop_last=batch.drop_last
    )


def read_held_out(name: str, source: Any, recipe: Recipe, task: Task) -> SampleSource:
    """Return a held-out set as map-style data; of a stream, the first samples; of a DataLoader, its own.

    Raises:
        RecipeError: the set is a stream, and the recipe does not limit the number of samples.
        DataError: see `unpack_held_out`.
    """
    if isinstance(source, DataLoader):
        return unpack_held_out(name, source, recipe, task)
    if not is_stream(source):
        return cast(SampleSource, source)
    most = recipe.evaluate.max_samples
    if not most:
        raise RecipeError(
            f"the held-out data{f' {name!r}' if name else ''} is a stream, of which nobody knows the end",
            where="evaluate.max_samples",
            next_step="say how many of its first samples are kept in memory and evaluated on",
        )
    return list(islice(cast("Iterable[Any]", source), most))


def _prepare_stream(task: Task, recipe: Recipe) -> Task:
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
    num_parts = _num_parts(stream, batch.shards)
    positions = StreamPositions(stream, batch.size, num_parts, recipe.seed)
    return replace(task, data=positions, order=StreamOrder(positions))


def _num_parts(stream: Any, shards: int | None) -> int:
    """Return one part per shard of a batch, or 1 if their number is open or the stream has fewer parts."""
    if shards is None or not callable(getattr(stream, "shard", None)):
        return 1
    return shards if shards <= getattr(stream, "num_shards", shards) else 1
