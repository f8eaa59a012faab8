"""Warnings before the first step: unused keys, missing kernels, uneven or very small micro-batches.

Only what depends on the task and on the number of processes is checked here; a contradiction inside a
recipe is an error of the recipe (`recipe.constraints`). Invariant: a warning changes nothing about the
run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from paceline.comm.codecs.codec_kernels import CodecKernels, find_kernels
from paceline.comm.group_collectives import all_gather_texts
from paceline.data.task_data import build_order
from paceline.errors import format_count
from paceline.job.mesh import Mesh
from paceline.models.dropout import KeyedDropout
from paceline.parallel.session_context import SessionContext
from paceline.parallel.sync_batchnorm import batch_norms_of
from paceline.recipe.constraints import SessionFacts
from paceline.recipe.recipe import Recipe, max_sharers
from paceline.recipe.support import num_sharers
from paceline.recipe.validation import default_value, get_value, list_needs
from paceline.task import Task


def find_unused_keys(recipe: Recipe, task: Task, mesh: Mesh, num_nodes: int = 1) -> Iterator[str]:
    """Yield a sentence for each key that is set and has no effect with this task and these processes.

    Args:
        recipe: with the strategy as it runs.
        task: of the run.
        mesh: of all ranks.
        num_nodes: of the job.
    """
    facts = SessionFacts(
        recipe,
        has_batch_norm=bool(batch_norms_of(task.model)),
        has_held_out=task.held_out is not None or recipe.federated.held_out > 0,
        num_nodes=num_nodes,
        num_replicas=mesh.replica.size,
        num_data_ranks=mesh.data.size,
        num_tensor_ranks=mesh.axes["tensor"].size,
    )
    for key, need in list_needs(Recipe):
        if need.scope == "session" and need.is_unmet(key, facts, default_value(Recipe, key)):
            yield f"{key} = {get_value(recipe, key)} has no effect: {need.found}"


def warn_missing_kernels(context: SessionContext) -> None:
    """Warn if ranks have no compiled kernels for the codec; collective if several ranks encode on CPUs."""
    world, strategy = context.mesh.world, context.recipe.strategy
    is_compiled = any(spec.compiled for spec, _ in strategy.codec_words)
    if world.size == 1 or context.device.type != "cpu" or not is_compiled:
        return
    kernels = find_kernels()
    local_reason = "" if isinstance(kernels, CodecKernels) else kernels
    reasons = all_gather_texts(local_reason, world, context.net)
    ranks = [rank for rank, reason in enumerate(reasons) if reason]
    if ranks:
        context.warn(
            f"warning: codec={strategy.codec} has no compiled kernels on ranks {ranks}"
            f" ({reasons[ranks[0]]}). PyTorch operations are used instead: the same bytes are sent, and"
            " encoding takes 4 to 8 times as long (benchmarks.coding)."
        )


MIN_SAMPLES_FOR_STATISTICS = 8
"""Number of samples in a micro-batch below which BatchNorm statistics are warned about."""


def warn_before_start(context: SessionContext, task: Task) -> None:
    """Print what is special about the data order, and warn of unused keys and of the micro-batches."""
    about = build_order(context.recipe, task).about
    if about:
        context.warn(about)
    for text in find_unused_keys(context.recipe, task, context.mesh, context.cluster.num_nodes):
        context.warn(f"warning: {text}")
    for text in micro_batch_warnings(context, task):
        context.warn(text)


def micro_batch_warnings(context: SessionContext, task: Task) -> Iterator[str]:
    """Yield a warning for each effect of the number of micro-batches that a user may not expect."""
    shards, strategy, batch = context.shards, context.recipe.strategy, context.recipe.batch
    if strategy.sync_spec.trains_clients:
        return  # its micro-batches are whole local steps
    limit_key = max_sharers(context.recipe).limit_key
    yield from uneven_shares_warning(shards, num_sharers(strategy), limit_key)
    norms = {type(module).__name__ for module in batch_norms_of(task.model) if module.training}
    if not batch.sync_batchnorm and norms and batch.size // shards < MIN_SAMPLES_FOR_STATISTICS:
        yield few_samples_warning(sorted(norms)[0], batch.size // shards)
    affected = [
        *(["BatchNorm statistics"] if norms and not batch.sync_batchnorm else []),
        *(["dropout masks"] if any(map(_is_active_dropout, task.model.modules())) else []),
    ]
    if affected and batch.shards is None and not context.recipe.reproducible:
        yield (
            f"warning: {' and '.join(affected)} depend on the number of micro-batches (now {shards}, from the"
            f" number of processes). Set batch.shards = {shards} to get the same ones on any number of"
            " processes."
        )


def find_unruled_buffers(model: nn.Module, task: Task) -> frozenset[str]:
    """Return the buffers of fractions for which the task has named no rule, except those of BatchNorm."""
    norms = {name for name, module in model.named_modules() if isinstance(module, _BatchNorm)}
    saved = model.state_dict(keep_vars=True)
    return frozenset(
        name
        for name, b in model.named_buffers()
        if name in saved
        and b.is_floating_point()
        and name.rpartition(".")[0] not in norms
        and not any(fnmatchcase(name, pattern) for pattern in task.buffers)
    )


def unruled_buffers_warning(names: Sequence[str], num_micro_batches: int) -> str:
    """Return the warning about buffers that the first step has changed although the task names no rule."""
    others = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return (
        f"warning: the forward changes the buffer '{names[0]}'{others}, which moves by the mean of the"
        f" changes of {num_micro_batches} micro-batches. That is right for a mean over samples; a sum over"
        " samples, such as the counts of a codebook, then depends on their number. Name its rule in"
        f" Task(buffers={{'{names[0]}': ...}}): 'mean', 'sum', 'ema:DECAY' or a function."
    )


def uneven_shares_warning(shards: int, sharers: int, limit_key: str) -> Iterator[str]:
    """Yield a warning if the micro-batches cannot be shared equally by the ranks or lanes."""
    if shards % sharers == 0 or not limit_key.startswith("batch.shards"):
        return
    most, fewest = -(-shards // sharers), shards // sharers
    yield (
        f"warning: {limit_key} = {shards} is no multiple of the {sharers} ranks or lanes: some run {most}"
        f" micro-batches and others {fewest}, so a step takes up to {most * sharers / shards:.2g} times as"
        f" long as with equal shares. Use a multiple of {sharers}."
    )


def few_samples_warning(norm: str, samples: int) -> str:
    """Return the warning that a BatchNorm module sees few samples at once."""
    return (
        f"warning: {norm} computes its statistics over only {format_count(samples, 'sample')}, those of"
        " one micro-batch."
        " Use a larger batch.size, fewer batch.shards or processes, or batch.sync_batchnorm = true."
    )


def _is_active_dropout(module: nn.Module) -> bool:
    return (
        isinstance(module, KeyedDropout | nn.modules.dropout._DropoutNd) and module.p > 0 and module.training
    )
