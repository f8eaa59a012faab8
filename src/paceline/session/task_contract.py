"""Checks of a task before the first step: its data, its model, and its loss on a sample and two copies.

Invariant: an error here names a mistake that would have trained something else silently. Mistakes that one
sample cannot show pass (a loss of zero, a loss that by its nature is not a sum over samples).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import nn

from paceline.comm.group_collectives import all_gather_texts
from paceline.comm.net import Net
from paceline.data.loader import collate_samples
from paceline.data.sample_order import BatchOrder
from paceline.data.work import LoadedBatch, MicroBatch
from paceline.errors import DataError, StrategyError, TaskError, format_count
from paceline.job.mesh import RankGroup
from paceline.parallel.model_runner import ModelRunner
from paceline.recipe.recipe import Recipe
from paceline.recipe.tables import OptimizerRecipe
from paceline.task import Loss, Task

_RELATIVE_TOLERANCE = 1e-3
_COUNT = "Loss(total, count): count is the number of items in the total, for example len(batch)"
_MAX_PROBED_SAMPLES = 8  # samples, until one has an item
_SHARED_OPTIMIZER_KEYS = ("clip_norm",)  # of the recipe's optimizer, when the task brings its own


def require_data(task: Task) -> None:
    """Raise a DataError if the training data is empty."""
    if len(task.data) == 0:
        raise DataError(
            "the training data is empty", next_step="check the task's options that select the data"
        )


def check_task_loss(task: Task, runner: ModelRunner, net: Net, world: RankGroup) -> None:
    """Call the loss on a sample and on two copies of it, and learn the names of its metrics; collective.

    The layout runs the model, since a rank may hold a part of it; ranks that compute the loss send it to
    the others.

    Raises:
        TaskError: the loss does not return a `Loss`, counts nothing, or returns means instead of sums.
    Wire: a forward of three samples, and one ragged all_gather of some bytes.
    """
    num_probed = min(_MAX_PROBED_SAMPLES, len(task.data))
    # A sample may have no items, for example only padding.
    for index in range(num_probed):
        with torch.random.fork_rng(), restore_buffers(runner.sharded_model.model):
            once, twice = _call_twice(task, runner, index, net, world)
        if float(once.count) > 0:
            return refuse_means(once, twice)
    raise TaskError(
        f"the loss counts {format_count(float(once.count), 'item')} in the first"
        f" {format_count(num_probed, 'sample')}, so nothing would be trained",
        next_step=_COUNT,
    )


def _call_twice(task: Task, runner: ModelRunner, index: int, net: Net, world: RankGroup) -> tuple[Loss, Loss]:
    """Return the losses of a sample and of two copies of it, equal on all ranks; collective."""
    sample = task.data[index]
    device = runner.sharded_model.device
    micro_batches = (probe_batch(collate_samples(task, [sample] * count, device), count) for count in (1, 2))
    rows = runner.evaluate(micro_batches).per_micro_batch().tolist()
    local = json.dumps([runner.metric_names.names, rows]) if rows else ""
    names, rows = json.loads(next(text for text in all_gather_texts(local, world, net) if text))
    runner.metric_names.names = tuple(names)
    once, twice = (
        Loss(torch.tensor(total), count, dict(zip(names, metrics, strict=True)))
        for total, count, *metrics in rows
    )
    return once, twice


def probe_batch(batch: Any, num_samples: int = 1) -> LoadedBatch:
    """Return a collated batch as a micro-batch of step 0 and key 0, for a check."""
    micro_batch = MicroBatch(step=0, shard=0, indices=np.zeros(num_samples, dtype=np.int64), key=0)
    return LoadedBatch(micro_batch, batch)


@contextmanager
def restore_buffers(model: nn.Module) -> Iterator[None]:
    """Return a context manager that restores all buffers, also non-persistent ones, at its end."""
    before = [(m, n, b, b.clone()) for m in model.modules() for n, b in m._buffers.items() if b is not None]
    yield
    for module, name, buffer, value in before:
        module._buffers[name] = buffer
        if not buffer.is_meta:
            buffer.copy_(value)


def refuse_means(once: Loss, twice: Loss) -> None:
    """Raise a TaskError if a sum does not double for two copies of a sample."""
    total, count = (
        _growth_factor(float(getattr(once, name)), float(getattr(twice, name))) for name in ("total", "count")
    )
    if total == 1 and count == 2:
        raise TaskError(
            "the loss has the same total for one sample and for two copies of it, but different counts:"
            " the total is a mean, and would be divided by the count again",
            next_step="use Loss.mean(value, count) for a mean, or sum the losses: reduction='sum'",
        )
    if count == 1 and total in (1, 2):
        raise TaskError(
            f"the loss counts {format_count(float(once.count), 'item')} in a sample and as many in two"
            " copies of it: micro-batches of different sizes would have equal weights",
            next_step=_COUNT,
        )
    wrong = [name for name in _find_means(once.metrics, twice.metrics) if count == 2]
    if wrong:
        raise TaskError(
            f"the metric '{wrong[0]}' is the same for one sample and for two copies of it: it is a mean, but"
            " metrics are added up",
            next_step=f"return the sum, for example {wrong[0]} * len(batch), or Metric(total, count)",
        )


def _find_means(once: Mapping[str, Any], twice: Mapping[str, Any]) -> list[str]:
    return [
        name for name in once if name in twice and _growth_factor(float(once[name]), float(twice[name])) == 1
    ]


def _growth_factor(once: float, twice: float) -> int:
    """Return 1 if equal, 2 if doubled, 0 if neither or too small to decide."""
    if not math.isfinite(once) or not math.isfinite(twice) or abs(once) < 1e-12:
        return 0
    return next(
        (factor for factor in (1, 2) if math.isclose(twice, factor * once, rel_tol=_RELATIVE_TOLERANCE)), 0
    )


def refuse_two_optimizers(recipe: Recipe) -> None:
    """Raise a TaskError if the recipe sets optimizer options that the task's own optimizer does not read."""
    defaults = OptimizerRecipe()
    unread = [
        name
        for name in OptimizerRecipe.model_fields
        if name not in _SHARED_OPTIMIZER_KEYS and getattr(recipe.optimizer, name) != getattr(defaults, name)
    ]
    if unread:
        keys = ", ".join(f"optimizer.{name}" for name in unread)
        raise TaskError(
            f"the task has its own optimizer, Task(optimizer=...), which does not read {keys} of the recipe",
            next_step="pass them to the task's optimizer by [options], or remove Task(optimizer=...)",
        )


def refuse_repeated_momentum_or_clip(recipe: Recipe, task: Task) -> None:
    """Raise if the optimizer repeats what a codec already does to gradients: momentum or clipping.

    Raises:
        StrategyError: codec=dgc is combined with an optimizer that has momentum, or with
            `optimizer.clip_norm`.
    """
    codecs, optimizer = recipe.strategy.codec_alternatives, recipe.optimizer
    if optimizer.clip_norm is not None and any(codec.clip_norm is not None for codec in codecs):
        raise StrategyError(
            "codec=dgc:K:M:C clips the gradients of each rank, and optimizer.clip_norm would clip their"
            " sum again",
            next_step="remove optimizer.clip_norm, or remove C from dgc:K:M:C",
        )
    has_momentum = any(codec.codec_has_momentum for codec in codecs)
    if has_momentum and task.optimizer is None and (optimizer.name != "sgd" or optimizer.momentum):
        raise StrategyError(
            "codec=dgc applies momentum to the gradients of each rank, and the optimizer would apply it"
            f" again: found {optimizer.name}, momentum = {optimizer.momentum:g}",
            next_step='set optimizer.name = "sgd" without momentum, and its momentum as codec=dgc:0.01:0.9',
        )


def warn_large_batch(recipe: Recipe, task: Task, warn: Callable[[str], None]) -> None:
    """Warn if a batch is larger than the data, which is rarely intended."""
    size, num_samples = recipe.batch.size, len(task.data)
    if size > num_samples:
        warn(
            f"warning: batch.size = {size} is larger than the data set of"
            f" {format_count(num_samples, 'sample')}, so"
            " every step trains on all of them."
        )


def require_same_order(order: BatchOrder, net: Net, group: RankGroup) -> None:
    """Compare the sample order of all ranks; collective if it does not follow from the recipe alone.

    Raises:
        DataError: the sampler or stream of a rank differs from that of rank 0, or from its own second pass.
    Wire: one ragged all_gather of a hash, if the order has one.
    """
    local = order.fingerprint()
    fingerprints = all_gather_texts(local, group, net) if local else [local]
    if len(set(fingerprints)) > 1:
        rank = next(rank for rank, other in enumerate(fingerprints) if other != fingerprints[0])
        raise DataError(
            f"rank {rank} reads other samples than rank 0, but every rank must see the same data; otherwise"
            " some samples would be skipped and others used twice",
            next_step="remove sharding by rank or machine, because Paceline distributes samples to ranks; and"
            " draw random numbers from the global generators, which are seeded alike",
        )


def require_equal_shapes(model: nn.Module, net: Net, group: RankGroup) -> None:
    """Compare names, shapes and dtypes of the models that the ranks have built; collective.

    Raises:
        TaskError: they differ; the error names the rank and the first tensor that differs.
    Wire: one ragged all_gather of a hash; another one of all names and shapes if the hashes differ.
    """
    tensors = [*model.named_parameters(), *model.named_buffers()]
    text = json.dumps({name: f"{tuple(t.shape)} {t.dtype}" for name, t in tensors})
    hashes = all_gather_texts(blake2b(text.encode(), digest_size=16).hexdigest(), group, net)
    if len(set(hashes)) == 1:
        return
    # All names and shapes are sent only to name the difference.
    models = [json.loads(model) for model in all_gather_texts(text, group, net)]
    first = models[0]
    rank = next(rank for rank, model in enumerate(models) if list(model.items()) != list(first.items()))
    other = models[rank]
    names = [name for name in [*first, *other] if first.get(name) != other.get(name)]
    name = names[0] if names else next(a for a, b in zip(first, other, strict=True) if a != b)
    raise TaskError(
        f"ranks have built different models: '{name}' is {first.get(name, 'missing')} on rank 0 and"
        f" {other.get(name, 'missing')} on rank {rank}" + ("" if names else ", in another order"),
        next_step="build the same model on every rank: nothing in it may depend on the rank or the machine",
    )
