"""Keys of a recipe that are set and cannot act here: what only the task and the number of processes can tell.

Invariant: each is named in a sentence of its own, and nothing about the run changes. What the recipe alone
can tell is an error of the recipe (`recipe.acting`).

Says that ranks have no compiled kernels, where the codec has some.

What a run says of its micro-batches before it begins: unequal shares, and what depends on their number.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from paceline.comm.codecs.codec_kernels import CodecKernels, find_kernels
from paceline.comm.group_collectives import all_gather_texts
from paceline.data.sample_order import BatchOrder
from paceline.data.task_data import build_order
from paceline.errors import StrategyError
from paceline.job.mesh import Mesh
from paceline.models.dropout import KeyedDropout
from paceline.parallel.session_context import SessionContext
from paceline.parallel.sync_batchnorm import batch_norms_of, synchronize_batch_norms
from paceline.recipe.recipe import Recipe, max_sharers
from paceline.recipe.support import num_sharers
from paceline.recipe.validation import NEEDS_HELD_OUT, SESSION_NEEDS, default_value, get_value
from paceline.task import Task


def find_unused_keys(recipe: Recipe, task: Task, mesh: Mesh, num_nodes: int = 1) -> Iterator[str]:
    """A sentence for every key that is set and cannot act.

    Args:
        recipe: with the strategy as it runs.
    """
    for key, why in _unused_keys(recipe, task, mesh, num_nodes):
        if get_value(recipe, key) != default_value(Recipe, key):
            yield f"{key} = {get_value(recipe, key)} has no effect: {why}"


def _unused_keys(recipe: Recipe, task: Task, mesh: Mesh, num_nodes: int) -> Iterator[tuple[str, str]]:
    rule, sharers = recipe.strategy.rule, mesh.axes["tensor"].size
    if not batch_norms_of(task.model):
        yield "batch.sync_batchnorm", "the model has no BatchNorm"
    if num_nodes == 1 and not recipe.strategy.servers:
        yield "security.tls", "there is one node, and no server"
    if sharers == 1:
        yield "tensor", "no tensors are cut: the strategy has no tensor"
    if task.held_out is None:
        no_data = "the task has no held-out data, Task(held_out=...)"
        yield from ((key, no_data) for key, acts in SESSION_NEEDS.items() if acts == NEEDS_HELD_OUT)
    if rule.sums and mesh.data.size == 1:
        alone = "one rank runs all samples, so no gradient is sent"
        summed = "strategy.codec", "runtime.bucket_bytes", "runtime.bucket_latency", "runtime.link_profile"
        yield from ((key, alone) for key in summed)
        if sharers == 1:
            yield "strategy.route", alone
    if mesh.replica.size == 1:
        yield "strategy.balance", "one replica runs all shards"
    if rule.agrees == "replica" and mesh.replica.size == 1 and not rule.reads:
        yield "strategy.sync", "one replica has nobody to average with"


_CODECS_WITH_KERNELS = {"bf16", "fp16", "int8", "int4", "int2", "fixed", "sign", "topk", "dgc"}


def warn_missing_kernels(context: SessionContext) -> None:
    """One line for all ranks, with what it costs; collective, where several ranks code on processors."""
    world, strategy = context.mesh.world, context.recipe.strategy
    words = {spec.word for spec, _ in strategy.links}
    if world.size == 1 or context.device.type != "cpu" or not words & _CODECS_WITH_KERNELS:
        return
    found = find_kernels()
    said = all_gather_texts("" if isinstance(found, CodecKernels) else found, world, context.net)
    without = [rank for rank, why in enumerate(said) if why]
    if without:
        context.warn(
            f"codec={strategy.codec} has no compiled kernels on ranks {without}, as {said[without[0]]}:"
            " PyTorch's operations write the same bytes in 4 to 8 times the time (`benchmarks.coding`)"
        )


MIN_SAMPLES_FOR_STATISTICS = 8
"""Samples below which statistics over a micro-batch are said to be of few."""


def warn_before_start(context: SessionContext, task: Task) -> None:
    """Say what of the recipe has no effect here, and what there is to know of the micro-batches."""
    about = build_order(context.recipe, task).about
    idle = find_unused_keys(context.recipe, task, context.mesh, context.cluster.num_nodes)
    for text in (*([about] if about else []), *idle, *micro_batch_warnings(context, task)):
        context.warn(text)


def micro_batch_warnings(context: SessionContext, task: Task) -> Iterator[str]:
    """A sentence for each thing about the micro-batches that a user should know."""
    shards, strategy, batch = context.shards, context.recipe.strategy, context.recipe.batch
    called = max_sharers(context.recipe).called
    yield from uneven_shares_warning(shards, num_sharers(strategy), called)
    norms = {type(module).__name__ for module in batch_norms_of(task.model)}
    if not batch.sync_batchnorm and norms and batch.size // shards < MIN_SAMPLES_FOR_STATISTICS:
        yield few_samples_warning(sorted(norms)[0], batch.size // shards)
    depends = [
        *(["the statistics of BatchNorm"] if norms and not batch.sync_batchnorm else []),
        *(["the masks of dropout"] if any(map(_is_active_dropout, task.model.modules())) else []),
    ]
    if depends and batch.shards is None and not context.recipe.reproducible:
        yield (
            f"{' and '.join(depends)} depend on how a batch is cut: here into {shards}, which follows from"
            f" the number of processes; batch.shards = {shards} keeps that on any number of them"
        )


def uneven_shares_warning(shards: int, sharers: int, called: str) -> Iterator[str]:
    """What it costs that micro-batches are not shared equally."""
    if shards % sharers == 0 or not called.startswith("batch.shards"):
        return
    most, fewest = -(-shards // sharers), shards // sharers
    yield (
        f"{called} = {shards} on {sharers} ranks or lanes: some run {most} micro-batches and others {fewest},"
        f" so a step takes up to {most * sharers / shards:.2g} times as long as with equal shares, which a"
        f" multiple of {sharers} gives"
    )


def few_samples_warning(norm: str, samples: int) -> str:
    """That a norm over the batch sees few samples at once."""
    return (
        f"{norm} takes its statistics from the {samples} samples of a micro-batch, which are few; a larger"
        " batch.size, fewer batch.shards or processes, or batch.sync_batchnorm = true gives it more"
    )


def _is_active_dropout(module: nn.Module) -> bool:
    return isinstance(module, KeyedDropout | nn.modules.dropout._DropoutNd) and module.p > 0


def synchronize_batch_norm(context: SessionContext, model: nn.Module, order: BatchOrder) -> None:
    """Let BatchNorm take its statistics over all ranks of a step, if the recipe says so; collective.

    Raises:
        StrategyError: some rank runs no micro-batch in some step, or several.
    """
    group, shards = context.mesh.data, context.shards
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
        context.close_callbacks.append(synchronize_batch_norms(model, group, context.net))
