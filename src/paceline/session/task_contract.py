"""Does a task keep its contract? Asked once, on a sample and on the same sample twice, before the first step.

Invariant: an error here names a mistake that would have trained something else in silence. What a sample
cannot show (a loss of zero, a loss that is no sum over samples by nature) is let through.
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

from paceline.comm.codecs.strategy_codec import local_clip_norm
from paceline.comm.group_collectives import all_gather_texts
from paceline.comm.net import Net
from paceline.data.loader import collate_samples
from paceline.data.sample_order import BatchOrder
from paceline.data.work import LoadedBatch, MicroBatch
from paceline.errors import DataError, StrategyError, TaskError
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
    """Raises: DataError: there is nothing to train on."""
    if len(task.data) == 0:
        raise DataError("the training data is empty", next_step="look at the task's options that select it")


def check_loss(task: Task, runner: ModelRunner, net: Net, world: RankGroup) -> None:
    """Call the loss in evaluation, on a sample and on it twice; learns the names of its metrics; collective.

    The layout runs it, as a rank may hold a part of the model: those that see the loss tell the others.

    Raises:
        TaskError: it returns something else, counts nothing, or gives means where sums are needed.
    Wire: a forward of three samples, and one ragged all_gather of some bytes.
    """
    num_looked_at = min(_MAX_PROBED_SAMPLES, len(task.data))
    for index in range(num_looked_at):
        with torch.random.fork_rng(), restore_buffers(runner.sharded_model.model):
            once, twice = _call_twice(task, runner, index, net, world)
        if float(once.count) > 0:
            return refuse_means(once, twice)
    raise TaskError(
        f"the loss counts {float(once.count):g} items in the first {num_looked_at} samples,"
        " so nothing would train",
        next_step=_COUNT,
    )


def _call_twice(task: Task, runner: ModelRunner, index: int, net: Net, world: RankGroup) -> tuple[Loss, Loss]:
    """The losses of a sample and of it twice, as the first rank that sees them has them."""
    sample = task.data[index]
    micro_batches = (_micro_batch(task, [sample] * count, runner.sharded_model.device) for count in (1, 2))
    rows = runner.evaluate(micro_batches).per_micro_batch().tolist()
    mine = json.dumps([runner.metric_names.found, rows]) if rows else ""
    names, rows = json.loads(next(text for text in all_gather_texts(mine, world, net) if text))
    runner.metric_names.found = tuple(names)
    once, twice = (
        Loss(torch.tensor(total), count, dict(zip(names, metrics, strict=True)))
        for total, count, *metrics in rows
    )
    return once, twice


def _micro_batch(task: Task, samples: list[Any], device: torch.device) -> LoadedBatch:
    micro_batch = MicroBatch(step=0, shard=0, indices=np.zeros(len(samples), dtype=np.int64), key=0)
    return LoadedBatch(micro_batch, collate_samples(task, samples, device))


@contextmanager
def restore_buffers(model: nn.Module) -> Iterator[None]:
    """Restore all buffers, also non-persistent ones: a forward may change a counter."""
    before = [(m, n, b, b.clone()) for m in model.modules() for n, b in m._buffers.items() if b is not None]
    yield
    for module, name, buffer, value in before:
        module._buffers[name] = buffer
        if not buffer.is_meta:
            buffer.copy_(value)


def refuse_means(once: Loss, twice: Loss) -> None:
    """Raises: TaskError: a sum does not double when a sample is given twice."""
    total, count = (
        _growth_factor(float(getattr(once, name)), float(getattr(twice, name))) for name in ("total", "count")
    )
    if total == 1 and count == 2:
        raise TaskError(
            "the loss has the same total for one sample and for two copies of it, and different counts:"
            " the total is a mean, and would be divided by the count once more",
            next_step="Loss.mean(value, count) takes a mean; or sum the losses: reduction='sum'",
        )
    if count == 1 and total in (1, 2):
        raise TaskError(
            f"the loss counts {float(once.count):g} items in a sample and as many in the same sample twice:"
            " parts of unequal size would have equal weights",
            next_step=_COUNT,
        )
    wrong = [name for name in _find_means(once.metrics, twice.metrics) if count == 2]
    if wrong:
        raise TaskError(
            f"the metric '{wrong[0]}' is the same for a sample and for it twice: it is a mean, where sums"
            " are added",
            next_step=f"return the sum, for example {wrong[0]} * len(batch), or Metric(total, count)",
        )


def _find_means(once: Mapping[str, Any], twice: Mapping[str, Any]) -> list[str]:
    return [
        name for name in once if name in twice and _growth_factor(float(once[name]), float(twice[name])) == 1
    ]


def _growth_factor(once: float, twice: float) -> int:
    """1: equal; 2: doubled; 0: neither, or too small to tell."""
    if not math.isfinite(once) or not math.isfinite(twice) or abs(once) < 1e-12:
        return 0
    return next(
        (factor for factor in (1, 2) if math.isclose(twice, factor * once, rel_tol=_RELATIVE_TOLERANCE)), 0
    )


def refuse_two_optimizers(recipe: Recipe) -> None:
    """Raises: TaskError: the task brings its own optimizer, and the recipe sets options that nobody reads."""
    usual = OptimizerRecipe()
    unread = [
        name
        for name in OptimizerRecipe.model_fields
        if name not in _SHARED_OPTIMIZER_KEYS and getattr(recipe.optimizer, name) != getattr(usual, name)
    ]
    if unread:
        keys = ", ".join(f"optimizer.{name}" for name in unread)
        raise TaskError(
            f"the task brings its own optimizer, Task(optimizer=...), and the recipe sets {keys},"
            " which it would not read",
            next_step="set them in the task's optimizer, by [options]; or leave Task(optimizer=...) out",
        )


def refuse_repeated_momentum_or_clip(recipe: Recipe, task: Task) -> None:
    """Raise if the optimizer repeats what a codec already does to gradients: momentum or clipping.

    Raises:
        StrategyError: codec=dgc is combined with an optimizer that has momentum, or with
            `optimizer.clip_norm`.
    """
    codecs, optimizer = recipe.strategy.codec_alternatives, recipe.optimizer
    if optimizer.clip_norm is not None and any(local_clip_norm(codec) is not None for codec in codecs):
        raise StrategyError(
            "codec=dgc:K:M:C clips the gradients of each rank, and optimizer.clip_norm would clip their sum again",
            next_step="remove optimizer.clip_norm, or remove C from dgc:K:M:C",
        )
    has_momentum = any(spec.word == "dgc" for codec in codecs for spec, _ in codec.links)
    if has_momentum and task.optimizer is None and (optimizer.name != "sgd" or optimizer.momentum):
        raise StrategyError(
            "codec=dgc applies momentum to the gradients of each rank, and the optimizer would apply it again:"
            f" found {optimizer.name}, momentum = {optimizer.momentum:g}",
            next_step='set optimizer.name = "sgd" without momentum, and give the momentum as codec=dgc:0.01:0.9',
        )


def warn_large_batch(recipe: Recipe, task: Task, warn: Callable[[str], None]) -> None:
    """Warn if a batch is larger than the data, which is rarely intended."""
    size, found = recipe.batch.size, len(task.data)
    if size > found:
        warn(f"batch.size = {size} is more than the {found} samples: every step trains on all of them")


def require_same_order(order: BatchOrder, net: Net, group: RankGroup) -> None:
    """Compare what the ranks would read; collective, where the order does not follow from the recipe alone.

    Raises:
        DataError: a rank's sampler or stream gives something else than rank 0's; or not the same twice.
    Wire: one ragged all_gather of a hash, if there is one.
    """
    mine = order.fingerprint()
    found = all_gather_texts(mine, group, net) if mine else [mine]
    if len(set(found)) > 1:
        rank = next(rank for rank, other in enumerate(found) if other != found[0])
        raise DataError(
            f"rank {rank} reads other samples than rank 0, where every rank has to see the same data: samples"
            " would be left out, and others trained on twice",
            next_step="leave sharding by rank or machine out, as Paceline deals samples to ranks; and let"
            " what is drawn follow from the global generators, which are seeded alike",
        )


def require_equal_shapes(model: nn.Module, net: Net, group: RankGroup) -> None:
    """Compare the tensors of the models that the ranks have built; collective.

    Raises:
        TaskError: a rank's model has others than rank 0's; names the rank and the first tensor that differs.
    Wire: one ragged all_gather of a hash; of all names and shapes only where the hashes differ.
    """
    tensors = [*model.named_parameters(), *model.named_buffers()]
    mine = {name: f"{tuple(t.shape)} {t.dtype}" for name, t in tensors}
    text = json.dumps(mine)
    hashes = all_gather_texts(blake2b(text.encode(), digest_size=16).hexdigest(), group, net)
    if len(set(hashes)) == 1:
        return
    models = [json.loads(found) for found in all_gather_texts(text, group, net)]
    first = models[0]
    rank = next(rank for rank, found in enumerate(models) if list(found.items()) != list(first.items()))
    other = models[rank]
    names = [name for name in [*first, *other] if first.get(name) != other.get(name)]
    name = names[0] if names else next(a for a, b in zip(first, other, strict=True) if a != b)
    raise TaskError(
        f"ranks have built different models: '{name}' is {first.get(name, 'not there')} on rank 0 and"
        f" {other.get(name, 'not there')} on rank {rank}" + ("" if names else ", in another order"),
        next_step="build the model alike on every rank: nothing in it may depend on the rank or the machine",
    )
