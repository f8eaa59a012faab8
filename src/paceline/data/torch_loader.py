"""A `torch.utils.data.DataLoader` as data: what it holds is taken over, and what it says is held against the
recipe. Each of its arguments is accepted or refused by name; none is dropped."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, default_collate

from paceline.errors import DataError
from paceline.task import Task, is_stream, require_samples

if TYPE_CHECKING:
    from paceline.recipe import Recipe


def taken_apart(task: Task, recipe: Recipe) -> Task:
    """The task with the data set, the collate function and the sampler of its loader.

    Raises:
        DataError: an argument of the loader says something else than the recipe, or has no meaning here.
    """
    loader: DataLoader[Any] = task.data
    require_samples("data", loader.dataset)
    wrong = [*_unlike_the_recipe(loader, recipe), *_without_meaning(loader, task)]
    if wrong:
        raise DataError(
            "the DataLoader does not go with the recipe: " + "; ".join(wrong),
            where="Task(data=DataLoader(...))",
            next_step="give the data set itself, Task(data=dataset, collate=..., sampler=...), and the rest"
            " in the recipe's [batch] and [loader]",
        )
    own = loader.collate_fn
    collate = task.collate if own is default_collate or loader.batch_size is None else own
    return replace(task, data=loader.dataset, collate=collate, sampler=_sampler_of(loader) or task.sampler)


def _sampler_of(loader: DataLoader[Any]) -> Any:
    """One that orders samples as neither `shuffle=True` nor `shuffle=False` does."""
    if is_stream(loader.dataset) or type(loader.sampler) is SequentialSampler or _shuffles(loader):
        return None
    return loader.sampler


def _shuffles(loader: DataLoader[Any]) -> bool:
    sampler = loader.sampler
    return type(sampler) is RandomSampler and not sampler.replacement and sampler._num_samples is None


def _unlike_the_recipe(loader: DataLoader[Any], recipe: Recipe) -> Iterator[str]:
    """What both say, and say differently."""
    batch = recipe.batch
    said = {
        "batch_size": (loader.batch_size, "batch.size", batch.size),
        "drop_last": (loader.drop_last, "batch.drop_last", batch.drop_last),
        "num_workers": (loader.num_workers, "loader.workers", recipe.loader.workers),
    }
    if not is_stream(loader.dataset) and _sampler_of(loader) is None:
        said["shuffle"] = (_shuffles(loader), "batch.shuffle", batch.shuffle)
    if loader.num_workers:
        said["prefetch_factor"] = (loader.prefetch_factor, "loader.prefetch", recipe.loader.prefetch)
    for name, (own, called, value) in said.items():
        if own != value:
            yield f"{name} is {own}, and {called} = {value}"


def _without_meaning(loader: DataLoader[Any], task: Task) -> Iterator[str]:
    """What nobody would read."""
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
    if task.collate is not None and loader.collate_fn is not default_collate:
        yield "collate_fn: the task has a collate function too"
    if task.sampler is not None and _sampler_of(loader) is not None:
        yield "sampler: the task has a sampler too"
