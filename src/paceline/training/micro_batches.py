"""What a run says of its micro-batches before it begins: unequal shares, and what depends on their number."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from paceline.data import Batches, build_order
from paceline.errors import StrategyError
from paceline.layout.synced_norm import norms_of, synchronize_norms
from paceline.models import KeyedDropout
from paceline.recipe import most_sharers
from paceline.recipe.support import num_sharers
from paceline.task import Task
from paceline.training.arrange import Setting
from paceline.training.idle import idle_keys

FEW = 8
"""Samples below which statistics over a micro-batch are said to be of few."""


def tell_before(setting: Setting, task: Task) -> None:
    """Say what of the recipe has no effect here, and what there is to know of the micro-batches."""
    about = build_order(setting.recipe, task).about
    idle = idle_keys(setting.recipe, task, setting.mesh, setting.cluster.num_nodes)
    for text in (*([about] if about else []), *idle, *micro_batch_lines(setting, task)):
        setting.warn(text)


def micro_batch_lines(setting: Setting, task: Task) -> Iterator[str]:
    """A sentence for each thing about the micro-batches that a user should know."""
    shards, strategy, batch = setting.shards, setting.recipe.strategy, setting.recipe.batch
    called = most_sharers(setting.recipe).called
    yield from uneven_line(shards, num_sharers(strategy), called)
    norms = {type(module).__name__ for module in norms_of(task.model)}
    if not batch.sync_batchnorm and norms and batch.size // shards < FEW:
        yield few_line(sorted(norms)[0], batch.size // shards)
    depends = [
        *(["the statistics of BatchNorm"] if norms and not batch.sync_batchnorm else []),
        *(["the masks of dropout"] if any(map(_drops, task.model.modules())) else []),
    ]
    if depends and batch.shards is None and not setting.recipe.reproducible:
        yield (
            f"{' and '.join(depends)} depend on how a batch is cut: here into {shards}, which follows from"
            f" the number of processes; batch.shards = {shards} keeps that on any number of them"
        )


def uneven_line(shards: int, sharers: int, called: str) -> Iterator[str]:
    """What it costs that micro-batches are not shared equally."""
    if shards % sharers == 0 or not called.startswith("batch.shards"):
        return
    most, fewest = -(-shards // sharers), shards // sharers
    yield (
        f"{called} = {shards} on {sharers} ranks or lanes: some run {most} micro-batches and others {fewest},"
        f" so a step takes up to {most * sharers / shards:.2g} times as long as with equal shares, which a"
        f" multiple of {sharers} gives"
    )


def few_line(norm: str, samples: int) -> str:
    """That a norm over the batch sees few samples at once."""
    return (
        f"{norm} takes its statistics from the {samples} samples of a micro-batch, which are few; a larger"
        " batch.size, fewer batch.shards or processes, or batch.sync_batchnorm = true gives it more"
    )


def _drops(module: nn.Module) -> bool:
    return isinstance(module, KeyedDropout | nn.modules.dropout._DropoutNd) and module.p > 0


def synchronize(setting: Setting, model: nn.Module, order: Batches) -> None:
    """Let BatchNorm take its statistics over all ranks of a step, if the recipe says so; collective.

    Raises:
        StrategyError: some rank runs no micro-batch in some step, or several.
    """
    group, shards = setting.mesh.data, setting.shards
    if not setting.recipe.batch.sync_batchnorm:
        return
    last = order.batch_size(order.steps_per_epoch - 1)
    if shards != group.size or last < shards:
        why = (
            f"a batch is cut into {shards} micro-batches, and {group.size} ranks run one each"
            if shards != group.size
            else f"the last batch of an epoch has {last} samples for {shards} ranks"
        )
        raise StrategyError(
            f"batch.sync_batchnorm needs one micro-batch a rank in every step: {why}",
            next_step="leave batch.shards out" if shards != group.size else "set batch.drop_last = true",
        )
    if group.size > 1:
        setting.closers.append(synchronize_norms(model, group, setting.net))
